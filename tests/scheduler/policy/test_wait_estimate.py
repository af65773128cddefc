"""Estimated starts of waiting tasks, from the rest of each and measured token times."""

from __future__ import annotations

import pytest

from inferd.scheduler.policy.wait_estimate import (
    RemainingWork,
    TokenTimes,
    TurnEstimator,
    expected_starts,
)

RATES = TokenTimes(prompt_s=0.01, output_s=0.1)


def test_a_free_slot_is_taken_at_once() -> None:
    assert expected_starts([RemainingWork(0, 50)], [RemainingWork(10, 10)], 2, RATES) == [0.0]


def test_a_waiting_task_gets_the_slot_that_is_free_first() -> None:
    running = [RemainingWork(0, 50), RemainingWork(100, 10)]  # 5 s and 2 s

    starts = expected_starts(
        running, [RemainingWork(100, 10), RemainingWork(0, 1), RemainingWork(0, 1)], 2, RATES
    )

    assert starts == pytest.approx([2.0, 4.0, 4.1])


def test_running_tasks_past_the_slots_wait_before_the_others() -> None:
    assert expected_starts(
        [RemainingWork(0, 10), RemainingWork(0, 10)], [RemainingWork(0, 1)], 1, RATES
    ) == [2.0]


def test_without_waiting_tasks_there_are_no_starts() -> None:
    assert expected_starts([], [], 4, RATES) == []


def test_token_times_and_lengths_are_learned_from_ended_turns() -> None:
    estimator = TurnEstimator()

    estimator.learn_rates(prompt_tokens=200, prompt_s=1.0, output_tokens=40, output_s=2.0)
    estimator.learn_length(40)

    assert estimator.token_times == TokenTimes(0.005, 0.05)
    assert estimator.mean_length.value == 40


def test_a_turn_without_output_does_not_change_the_output_time() -> None:
    estimator = TurnEstimator()
    estimator.learn_rates(prompt_tokens=10, prompt_s=0.1, output_tokens=20, output_s=2.0)

    for _ in range(20_000):
        estimator.learn_rates(prompt_tokens=10, prompt_s=0.1, output_tokens=0, output_s=0.0)

    assert estimator.token_times.output_s == pytest.approx(0.1)


def test_a_limit_bounds_the_expected_length_and_a_long_answer_continues() -> None:
    estimator = TurnEstimator()
    estimator.learn_length(40)

    assert estimator.remaining_work(100) == RemainingWork(100, 40)
    assert estimator.remaining_work(0, done=30, limit=32) == RemainingWork(0, 2)
    assert estimator.remaining_work(0, done=30) == RemainingWork(0, 10)
    assert estimator.remaining_work(0, done=90) == RemainingWork(0, 10)
    assert estimator.remaining_work(0, done=90, limit=90) == RemainingWork(0, 0)


def test_answers_are_expected_to_reach_limits_that_others_reached() -> None:
    estimator = TurnEstimator()
    for limit in (10, 70, 40):
        estimator.learn_length(limit, limit)

    assert estimator.remaining_work(0, limit=200).output_tokens == pytest.approx(200)
    assert estimator.remaining_work(0, done=50, limit=60).output_tokens == pytest.approx(10)


def test_the_mean_is_expected_if_limits_are_far_away() -> None:
    estimator = TurnEstimator()
    for _ in range(10):
        estimator.learn_length(100, 4096)

    assert estimator.remaining_work(0, limit=4096).output_tokens == pytest.approx(100)
    assert estimator.remaining_work(0, limit=64).output_tokens == pytest.approx(64)

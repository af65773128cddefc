"""Estimated starts of waiting tasks, from the rest of each and measured token times."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inferd.scheduler.owner import Priority
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.waiting import (
    QueuedTask,
    RemainingWork,
    StartEstimator,
    TokenTimes,
    TurnEstimator,
)

RATES = TokenTimes(prompt_s=0.01, output_s=0.1)
SETTINGS = EngineSettings(quantum_tokens=200, ageing_tokens=1000, priority_strict=True)
FAIR = replace(SETTINGS, priority_strict=False)


def rest(prompt: int, output: float, priority: Priority = Priority.NORMAL) -> QueuedTask:
    work = RemainingWork(prompt, output, output)
    return QueuedTask(work, priority, priority, rises_after=1000)


def endless(priority: Priority = Priority.NORMAL, quantum: int = 0) -> QueuedTask:
    return QueuedTask(RemainingWork(0, math.inf), priority, priority, quantum=quantum)


def starts(
    running: list[QueuedTask],
    waiting: list[QueuedTask],
    slots: int,
    reserved_after: int = 0,
    settings: EngineSettings = SETTINGS,
) -> list[float]:
    return StartEstimator(running, waiting, slots, RATES, settings, reserved_after).starts()


def test_a_free_slot_is_taken_at_once() -> None:
    assert starts([rest(0, 50)], [rest(10, 10)], 2) == [0.0]


def test_a_waiting_task_gets_the_slot_that_is_free_first() -> None:
    running = [rest(0, 50), rest(100, 10)]  # 5 s and 2 s

    assert starts(running, [rest(100, 10), rest(0, 1), rest(0, 1)], 2) == pytest.approx(
        [2.0, 4.0, 4.1]
    )


def test_running_tasks_past_the_slots_wait_before_the_others() -> None:
    assert starts([rest(0, 10), rest(0, 10)], [rest(0, 1)], 1) == [2.0]


def test_without_waiting_tasks_there_are_no_starts() -> None:
    assert starts([], [], 4) == []


def test_tasks_of_one_class_take_slots_at_the_ends_of_quanta() -> None:
    waiting = [endless(), endless(), endless()]

    found = starts([endless(quantum=150), endless()], waiting, 2)

    assert found == pytest.approx([5.0, 20.0, 25.0])


def test_a_higher_class_preempts_and_delays_those_behind_it() -> None:
    urgent, normal = rest(0, 10, Priority.URGENT), rest(0, 10)

    assert starts([rest(0, 50)], [urgent, normal], 1) == pytest.approx([0.0, 6.0])


def test_a_lower_class_waits_for_the_end_of_higher_ones_or_for_a_reserved_quantum() -> None:
    low, high = rest(0, 10, Priority.LOW), Priority.HIGH

    assert starts([rest(0, 50, high)], [low], 1) == [5.0]
    expected_to_end = QueuedTask(RemainingWork(0, 50), high, high)
    assert starts([expected_to_end], [low], 1) == [30.0], "others of its class may follow it"
    assert starts([endless(high)], [low], 1) == [30.0]
    assert starts([endless(Priority.NORMAL)] * 4, [low, rest(0, 10, Priority.LOW)], 4) == [
        30.0,
        45.0,
    ], "the second one by its age"
    two = [QueuedTask(RemainingWork(0, 10), 0, 0, idle_s=idle_s) for idle_s in (5, 6)]
    assert starts([endless(high)], two, 1) == [350.0, 30.0], "the one that waits longer is first"
    assert starts([endless(high)], [low], 1, reserved_after=1000) == [100.0]
    of_two = [QueuedTask(RemainingWork(0, 10), 0, 0, user=o, idle_s=i) for o, i in
              ((1, 7), (1, 6), (2, 5))]  # fmt: skip
    assert starts([endless(high)], of_two, 1) == [30.0, 670.0, 350.0], "owners take turns"


def test_a_user_gets_a_slot_of_another_by_guarantees_and_not_by_class() -> None:
    crowd = [replace(endless(Priority.HIGH), user=1) for _ in range(3)]
    low = replace(rest(0, 10, Priority.LOW), user=2)
    assert starts(crowd, [low, low], 3, settings=FAIR) == [0.0, 20.0], "one of three at once"
    assert starts(crowd[:1], [replace(low, idle_s=0.1)], 1, settings=FAIR) == [
        pytest.approx(2 * FAIR.slot_lag_s - 0.1)
    ], "behind by half of its wait"
    urgent = replace(rest(0, 10, Priority.URGENT), user=2)
    assert starts(crowd[:1], [urgent], 1, settings=FAIR) == [0.0]


def test_a_lower_class_rises_with_the_tokens_computed_meanwhile() -> None:
    low = rest(0, 10, Priority.LOW)
    running = [endless(Priority.NORMAL) for _ in range(100)]

    found = starts(running, [low], 100, reserved_after=1 << 20)

    assert found == [1000 * 0.1 / 100 + 200 * 0.1], "a class, and a quantum"


def test_an_owner_who_was_served_more_waits_for_the_others() -> None:
    served = QueuedTask(RemainingWork(0, 10), served=(70, 0))

    assert starts([endless(quantum=200)], [served], 1) == pytest.approx([7.0])


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


def test_a_limit_bounds_the_expected_length() -> None:
    estimator = TurnEstimator()
    estimator.learn_length(40)

    assert estimator.remaining_work(100) == RemainingWork(100, 40)
    assert estimator.remaining_work(0, done=30, limit=32) == RemainingWork(0, 2, 2)
    assert estimator.remaining_work(0, done=30) == RemainingWork(0, 10)
    assert estimator.remaining_work(0, done=90, limit=100) == RemainingWork(0, 10, 10)
    assert estimator.remaining_work(0, done=90, limit=90) == RemainingWork(0, 0, 0)


def test_a_bound_on_reasoning_shortens_the_expected_answer() -> None:
    estimator = TurnEstimator()
    estimator.learn_length(100, reasoning_tokens=70)
    assert estimator.remaining_work(5) == RemainingWork(5, 100)
    assert estimator.remaining_work(5, reasoning_budget=20) == RemainingWork(5, 50)
    assert estimator.remaining_work(5, reasoning_budget=0) == RemainingWork(5, 30)
    assert estimator.remaining_work(5, done=10, reasoning_budget=0) == RemainingWork(5, 20)
    assert estimator.remaining_work(5, reasoning_budget=80) == RemainingWork(5, 100)
    estimator.learn_length(30)
    assert estimator.remaining_work(5, reasoning_budget=0).output_tokens == pytest.approx(30)


def test_an_answer_longer_than_expected_shows_no_sign_of_its_end() -> None:
    estimator = TurnEstimator()

    assert estimator.remaining_work(0) == RemainingWork(0, math.inf), "no answer has ended yet"
    estimator.learn_length(40)

    assert estimator.remaining_work(0, done=40) == RemainingWork(0, math.inf)


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

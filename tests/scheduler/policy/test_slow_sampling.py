"""Slow tasks skip steps beside others, and a token that takes too long ends its task."""

from __future__ import annotations

import pytest

from inferd.backends import SamplingParams
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.order import Order
from inferd.scheduler.policy.slow_sampling import SLOW_S, TIMEOUT_AT, SlowSampling
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task

STEP_S = 0.01
USUAL_S = 0.0002
GRAMMAR = SamplingParams(grammar="root ::= [a-z]+")
ORDER = Order(0, OwnerClock(), EngineSettings())


def task(
    owner: int, sampling: SamplingParams = GRAMMAR, priority: Priority = Priority.NORMAL
) -> Task:
    spec = TaskSpec(
        id=owner, owner=Owner(owner), tokens=pack_tokens([1]), sampling=sampling, priority=priority
    )
    return Task.from_spec(spec, arrival=owner, clock=0, now=0.0)


def plain(owner: int, priority: Priority = Priority.NORMAL) -> Task:
    return task(owner, SamplingParams(), priority)


def tokens_in(
    slow: SlowSampling, costs: dict[Task, float], seconds: float
) -> tuple[dict[Task, int], float]:
    """Run tasks whose tokens take *costs* for *seconds*; return the tokens of each, and the time
    that sampling took.
    """
    tokens, now, sampled_s = dict.fromkeys(costs, 0), 0.0, 0.0
    while now < seconds:
        now += STEP_S
        for it in costs.keys() - slow.skipping([*costs], ORDER, now):
            tokens[it] += 1
            slow_s = slow.note_token(it, costs[it])
            now, sampled_s = now + costs[it], sampled_s + costs[it]
            if slow_s:
                slow.charge_task(it, slow_s, now, [*costs])
    return tokens, sampled_s


@pytest.mark.parametrize("cost_s", [0.01, 0.2, 0.9])
def test_a_neighbour_keeps_its_pace_beside_a_slow_task(cost_s: float) -> None:
    victim, attacker = plain(1), task(2)
    tokens, _ = tokens_in(SlowSampling(), {victim: USUAL_S, attacker: cost_s}, 30.0)
    alone = 30.0 / (STEP_S + USUAL_S)
    assert tokens[victim] >= 0.8 * alone
    assert tokens[attacker] >= 1


def test_the_slower_a_task_is_the_more_steps_it_skips() -> None:
    victim, slow, slower = plain(1), task(2), task(3)
    tokens, _ = tokens_in(SlowSampling(), {victim: USUAL_S, slow: 0.02, slower: 0.2}, 60.0)
    assert tokens[slow] > 5 * tokens[slower] > 0


def test_slow_tasks_of_several_owners_divide_the_share() -> None:
    costs = {plain(0): USUAL_S} | {task(owner): 0.1 for owner in range(1, 7)}
    tokens, sampled_s = tokens_in(SlowSampling(), costs, 60.0)
    assert sampled_s < 0.25 * 60
    assert all(tokens.values())


def test_a_new_turn_with_a_grammar_does_not_escape_its_owners_debt() -> None:
    slow, victim, before, after = SlowSampling(), plain(1), task(2), task(2)
    slow.charge_task(before, slow.note_token(before, 0.5), 0.0, [before, victim])
    assert slow.skipping([victim, after], ORDER, 0.1) == {after}


@pytest.mark.parametrize("others", [[], [plain(2, Priority.LOW)]])
def test_a_slow_task_alone_or_beside_lower_classes_skips_nothing(others: list[Task]) -> None:
    slow, it = SlowSampling(), task(2)
    slow.charge_task(it, slow.note_token(it, 0.5), 0.0, [it])
    assert not slow.skipping([it, *others], ORDER, 0.1)


def test_ordinary_samplers_are_never_slow() -> None:
    slow = SlowSampling()
    tasks = [plain(owner) for owner in range(16)]
    for cost_s in (0.00007, 0.0009):  # greedy, and the default samplers with 262k tokens
        for it in tasks:
            assert slow.note_token(it, cost_s) == 0


def test_a_task_that_was_slow_for_long_does_not_make_that_usual() -> None:
    slow, it = SlowSampling(), task(1)
    for _ in range(600):  # two minutes of tokens of 0.2 s
        slow.note_token(it, 0.2)
    assert slow.predicted_s < 0.002


@pytest.mark.parametrize(("seconds", "ends"), [(0.2, False), (0.999, False), (1.01, True)])
def test_a_token_that_takes_too_long_ends_the_task(seconds: float, ends: bool) -> None:
    error = SlowSampling().timeout(seconds)
    assert (error is not None) == ends
    if error is not None:
        assert error.data["timeout"] == "sampling" and "grammar" in (error.hint or "")


def test_the_timeout_follows_the_prediction() -> None:
    slow = SlowSampling()
    slow.predicted_s = 100 * SLOW_S + 0.2
    assert slow.timeout(TIMEOUT_AT * slow.predicted_s - 0.01) is None
    assert slow.timeout(TIMEOUT_AT * slow.predicted_s + 0.01) is not None

"""Alternation of generations and embeddings, and the order of texts."""

from __future__ import annotations

import pytest

from inferd.backends import EmbedInfo, SamplingParams
from inferd.backends.embedder import EmbedSpec
from inferd.scheduler.embeddings import (
    plan_text_tokens,
    plan_texts,
    truncated_tokens,
)
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.batch_plan import embeds_next
from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.order import Order
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task, TaskState

INFO = EmbedInfo(size=4, slots=3, batch_tokens_max=32, tokens_max=100)
WHOLE = EmbedInfo(size=4, slots=3, batch_tokens_max=32, tokens_max=32, whole=True)
SETTINGS = EngineSettings(ageing_tokens=1000)


def task(
    number: int, tokens: int = 10, *, owner: int = 1, priority: Priority = Priority.NORMAL
) -> Task:
    spec = TaskSpec(
        id=number,
        owner=Owner(owner),
        tokens=pack_tokens(range(tokens)),
        sampling=SamplingParams(),
        priority=priority,
        embed=EmbedSpec(),
    )
    return Task.from_spec(spec, arrival=number, clock=0, now=0.0)


def running(it: Task, slot: int, computed: int = 0) -> Task:
    it.slot, it.state, it.computed = slot, TaskState.RUNNING, computed
    return it


def decoding(number: int, *, priority: Priority = Priority.NORMAL) -> Task:
    it = running(task(number, priority=priority), 0, computed=10)
    it.tokens.append(1)
    return it


def order(owners: OwnerClock | None = None, clock: int = 0) -> Order:
    return Order(clock, owners or OwnerClock(), SETTINGS)


class Known(StepCost):
    """A machine on which a token takes a millisecond."""

    @property
    def known(self) -> bool:
        return True

    def predict(self, load: StepLoad) -> float:
        return load.tokens / 1000


# Generations and embeddings.


def test_generations_or_embeddings_alone_continue() -> None:
    texts, turns = [task(1)], [decoding(2)]
    for embedded in (False, True):
        assert embeds_next([], texts, order(), embedded=embedded)
        assert not embeds_next(turns, [], order(), embedded=embedded)
        assert not embeds_next([], [], order(), embedded=embedded)


def test_generations_and_embeddings_alternate() -> None:
    for turn in (decoding(1), task(1, 50)):
        assert embeds_next([turn], [task(2)], order(), embedded=False)
        assert not embeds_next([turn], [task(2)], order(), embedded=True)


def test_decoding_tasks_have_steps_beside_embeddings_of_any_class() -> None:
    urgent = task(1, priority=Priority.URGENT)
    assert not embeds_next([decoding(2, priority=Priority.LOW)], [urgent], order(), embedded=True)
    low = task(1, priority=Priority.LOW)
    assert embeds_next([decoding(2, priority=Priority.URGENT)], [low], order(), embedded=False)


def test_prompts_and_embeddings_of_a_lower_class_wait_for_the_higher_one() -> None:
    low, high = task(1, priority=Priority.LOW), task(2, priority=Priority.HIGH)
    assert not embeds_next([high], [low], order(), embedded=False)
    assert embeds_next([low], [high], order(), embedded=True)


def test_tasks_that_wait_for_a_higher_class_age_until_they_run() -> None:
    low, high = task(1, priority=Priority.LOW), task(2, priority=Priority.HIGH)
    low.age = 2 * SETTINGS.ageing_tokens
    assert embeds_next([high], [low], order(), embedded=False)
    assert not embeds_next([low], [high], order(), embedded=True)


# Admitted texts.


def test_texts_are_admitted_in_the_order_of_the_queue_while_they_fit() -> None:
    waiting = [task(1, 30), task(2, 30, priority=Priority.HIGH), task(3, 30), task(4, 5)]
    plan = plan_texts(waiting, [], order(), INFO)
    assert [t.spec.id for t in plan.start] == [2, 1, 3]
    assert not plan.park


def test_no_text_overtakes_one_that_does_not_fit() -> None:
    plan = plan_texts([task(1, 90), task(2, 5)], [running(task(3, 20), 0)], order(), INFO)
    assert plan.start == ()


def test_a_higher_class_drops_the_last_text_of_lower_ones() -> None:
    texts = [running(task(n, 30, priority=Priority.LOW), n) for n in (0, 1, 2)]
    plan = plan_texts([task(9, 20)], texts, order(), INFO)
    assert ([t.spec.id for t in plan.park], [t.spec.id for t in plan.start]) == ([2], [9])


def test_no_text_is_dropped_in_vain() -> None:
    texts = [running(task(0, 80), 0), running(task(1, 5, priority=Priority.LOW), 1)]
    assert plan_texts([task(9, 30)], texts, order(), INFO) == plan_texts([], [], order(), INFO)


def test_an_aged_text_is_not_dropped() -> None:
    aged = running(task(0, 80, priority=Priority.LOW), 0)
    aged.age = SETTINGS.ageing_tokens
    assert not plan_texts([task(9, 30)], [aged], order(), INFO).park


# Tokens of a step.


def rows_of(texts: list[Task], info: EmbedInfo, seconds: float) -> dict[int, int]:
    rows = plan_text_tokens(texts, order(), info, Known(), seconds, tokens_min=16)
    assert [r.task.slot for r in rows] == sorted(r.task.slot for r in rows)
    return {r.task.spec.id: r.count for r in rows}


def test_a_step_keeps_to_its_time_and_tokens() -> None:
    texts = [running(task(1, 50), 0)]
    assert rows_of(texts, INFO, 0.020) == {1: 20}
    assert rows_of(texts, INFO, 1.0) == {1: 32}
    assert rows_of(texts, INFO, 0.0) == {1: 16}, "the least"


def test_texts_share_a_step_and_the_first_in_order_is_served_first() -> None:
    texts = [running(task(1, 10), 0), running(task(2, 40, priority=Priority.URGENT), 1)]
    assert rows_of(texts, INFO, 1.0) == {2: 32}
    assert rows_of([running(task(1, 10), 0), running(task(2, 40), 1)], INFO, 1.0) == {1: 10, 2: 22}


def test_a_whole_text_is_never_split() -> None:
    texts = [running(task(1, 20), 0), running(task(2, 20), 1), running(task(3, 12), 2)]
    assert rows_of(texts, WHOLE, 0.001) == {1: 20, 3: 12}


# Truncated texts.

BEGIN, END = 101, 102


@pytest.mark.parametrize(
    ("around", "tokens", "truncated"),
    [
        ([], [1, 2, 3, 4, 5], [1, 2, 3, 4]),
        ([BEGIN], [BEGIN, 1, 2, 3, 4], [BEGIN, 1, 2, 3]),
        ([END], [1, 2, 3, 4, END], [1, 2, 3, END]),
        ([BEGIN, END], [BEGIN, 1, 2, 3, 4, END], [BEGIN, 1, 2, END]),
        ([BEGIN, END], [BEGIN, END, END, 1, 2, 3, 4, END], [BEGIN, END, END, END]),
        ([BEGIN, END], [BEGIN, 1, 2, 3, BEGIN, END], [BEGIN, 1, BEGIN, END]),
    ],
)
def test_a_truncated_text_keeps_the_tokens_that_the_model_adds_behind_it(
    around: list[int], tokens: list[int], truncated: list[int]
) -> None:
    assert truncated_tokens(tokens, around, 4) == truncated
    assert truncated_tokens(tokens, around, len(tokens)) == tokens
    assert set(truncated_tokens(tokens, around, 1)) <= {*around, tokens[0]}

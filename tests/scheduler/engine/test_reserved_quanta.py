"""Tasks of lower classes beside endless tasks of higher ones, on a clock that the test advances."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from inferd.backends import Chunk, EmbedSpec
from inferd.scheduler import EngineSettings
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Priority
from inferd.scheduler.policy.order import CHECK_S, ReservedQuanta
from inferd.scheduler.task import Task
from tests.repetitions import repetitions
from tests.scheduler.doubles import Bench

QUANTUM, BATCH_SIZE, STEP_S = 20, 32, 0.05
BEGAN, PASSED_OVER_S, RESERVED_SHARE = 100, 30, 16
EARLY_STEP_S = 0.5
"""The time of each step but the first until a second before a task is passed over: until then only
the clock matters.
"""
PERIOD = RESERVED_SHARE * QUANTUM
LOWER = 1_000_000
"""The first number of the tasks of lower classes."""


class Endless:
    """Tasks of one class that follow each other endlessly, so that no slot is ever free for long.
    Age in tokens raises no other task meanwhile.
    """

    def __init__(self, slots: int, count: int, priority: Priority = Priority.URGENT):
        settings = EngineSettings(
            ageing_tokens=10**9, quantum_tokens=QUANTUM, shared_prefix_tokens_min=1 << 20
        )
        self.bench = Bench(slots=slots, settings=settings, batch_size=BATCH_SIZE)
        self.engine, self.count, self.priority = self.bench.engine, count, priority
        self.embeds = False
        self.length: int | None = None
        self.submitted = 0

    @property
    def tokens(self) -> int:
        return self.engine.clock.tokens

    def task(self, number: int) -> Task:
        task = self.engine.tasks.find_task(number)
        assert task is not None
        return task

    def iterate(self, *commands: m.Submit) -> None:
        present = sum(t.spec.id < LOWER for t in self.engine.tasks)
        self.bench.iterate(*(self.one_more() for _ in range(self.count - present)), *commands)
        early = BEGAN < self.bench.now < BEGAN + PASSED_OVER_S - 1
        self.bench.now += EARLY_STEP_S if early else STEP_S

    def one_more(self) -> m.Submit:
        self.submitted += 1
        length = self.length or 1 + 7 * self.submitted % 80
        text = (f"{self.submitted:08}"[::-1] * 30)[:length]
        embed = EmbedSpec() if self.embeds else None
        return self.bench.submit(self.submitted, text, owner=2, priority=self.priority, embed=embed)

    def iterate_until_computed(self, number: int, tokens_max: int) -> float:
        """Iterate until a step computes a token of a task; return the seconds that this took. After
        `PASSED_OVER_S`, *tokens_max* tokens of other tasks may precede it.
        """
        began, limit = self.bench.now, None
        while (task := self.engine.tasks.find_task(number)) is not None and not task.computed:
            seconds = self.bench.now - began
            if limit is None and seconds >= PASSED_OVER_S:
                limit = self.tokens + tokens_max
            assert limit is None or self.tokens <= limit, f"nothing computed after {seconds:.1f} s"
            self.iterate()
        return self.bench.now - began


def test_a_low_task_computes_after_30_s_beside_sixteen_endless_urgent_ones() -> None:
    endless = Endless(slots=4, count=16)
    endless.iterate(endless.bench.submit(LOWER, "low", priority=Priority.LOW))

    seconds = endless.iterate_until_computed(LOWER, 3 * BATCH_SIZE)

    assert PASSED_OVER_S - STEP_S <= seconds <= PASSED_OVER_S + CHECK_S + 2 * STEP_S


@pytest.mark.parametrize("slots", [1, 4, 32])
def test_one_quantum_in_sixteen_goes_to_lower_classes(slots: int) -> None:
    endless = Endless(slots, count=slots + 4)
    lower = [
        endless.bench.submit(LOWER + i, "x" * 120, owner=3 + i % 2, priority=Priority(i % 3))
        for i in range(200)
    ]
    endless.iterate(*lower)
    while endless.bench.now < BEGAN + PASSED_OVER_S:
        endless.iterate()
    computed, of_lower, step = 0, 0, endless.bench.model.step

    def count_tokens(chunks: Sequence[Chunk]) -> None:
        nonlocal computed, of_lower
        for chunk in chunks:
            task = endless.engine.slots.slots[chunk.slot].task
            assert task is not None
            computed += len(chunk.tokens)
            of_lower += len(chunk.tokens) if task.spec.id >= LOWER else 0
        step(chunks)

    endless.bench.model.step = count_tokens  # type: ignore[method-assign]
    while computed < 6 * PERIOD:
        endless.iterate()

    assert 0.8 / RESERVED_SHARE <= of_lower / computed <= 1.6 / RESERVED_SHARE


@hypothesis.settings(max_examples=repetitions(25))
@hypothesis.given(
    slots=st.integers(1, 5),
    lower=st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=6),
    target=st.integers(0, 5),
)
def test_a_task_computes_after_30_s_and_sixteen_quanta_for_each_that_waits_longer(
    slots: int, lower: list[int], target: int
) -> None:
    """A step is not divided: the rest of the step in which a wait ends comes on top."""
    endless = Endless(slots, count=slots + 2)
    target %= len(lower)
    for i, priority in enumerate(lower):
        endless.iterate(endless.bench.submit(LOWER + i, "y" * 60, priority=Priority(priority)))

    endless.iterate_until_computed(LOWER + target, (PERIOD + BATCH_SIZE) * (target + 1))


def test_owners_get_reserved_quanta_in_turn_however_many_tasks_one_has() -> None:
    endless = Endless(slots=2, count=4)
    for i in range(10):
        endless.iterate(endless.bench.submit(LOWER + i, "y" * 60, owner=3, priority=Priority.LOW))
    last = LOWER + 10
    endless.iterate(endless.bench.submit(last, "y" * 60, owner=4, priority=Priority.LOW))

    endless.iterate_until_computed(last, 2 * (PERIOD + BATCH_SIZE))


def test_no_more_owners_of_reserved_quanta_are_remembered_than_there_may_be() -> None:
    bench = Bench(settings=EngineSettings(priority_strict=True))
    reserved, busy = ReservedQuanta(EngineSettings()), [task_of(bench, 0, Priority.URGENT)]
    reserved.OWNERS_MAX = 3
    for owner in range(1, 6):
        low = task_of(bench, owner, Priority.LOW)
        reserved.give_quantum([low], busy, bench.engine.tasks.order(), 0, bench.now + 60)
        assert (
            low.reserved_tokens and len(reserved._last_of_user) == len(reserved._last_of_owner) <= 3
        )


def task_of(bench: Bench, owner: int, priority: Priority) -> Task:
    return bench.engine.tasks.new_task(bench.spec(owner, owner=owner, priority=priority))


def test_a_low_prompt_in_a_slot_advances_beside_endless_urgent_prompts() -> None:
    endless = Endless(slots=4, count=0)
    endless.length = 200
    endless.iterate(endless.bench.submit(LOWER, "z" * 200, priority=Priority.LOW))
    started = endless.task(LOWER).computed
    endless.count = 3

    while endless.bench.now < BEGAN + PASSED_OVER_S + 1:
        assert endless.task(LOWER).computed == started or endless.bench.now > BEGAN + PASSED_OVER_S
        endless.iterate()
        first = min(t.spec.id for t in endless.engine.tasks)
        endless.bench.iterate(m.Cancel(first))  # none gets past its prompt

    assert endless.task(LOWER).computed > started


def test_a_low_task_with_an_adapter_computes_beside_endless_urgent_ones_without() -> None:
    endless = Endless(slots=4, count=3)
    low = endless.bench.submit(LOWER, "low", priority=Priority.LOW, adapters=("upper",))
    endless.iterate(low)

    endless.iterate_until_computed(LOWER, QUANTUM + 3 * BATCH_SIZE)


def test_a_step_that_excludes_other_tasks_is_charged_for_them() -> None:
    endless = Endless(slots=4, count=3)
    low = endless.bench.submit(LOWER, "low" * 9, priority=Priority.LOW, adapters=("upper",))
    endless.iterate(low)
    left = 0
    while (task := endless.engine.tasks.find_task(LOWER)) is not None and not task.computed:
        left = task.reserved_tokens or QUANTUM
        endless.iterate()

    assert task is not None
    assert task.reserved_tokens <= max(0, left - task.computed - 1)


def test_a_quantum_is_charged_for_computed_tokens_and_excluded_tasks() -> None:
    endless = Endless(slots=1, count=1)
    endless.iterate(endless.bench.submit(LOWER, "low", priority=Priority.LOW))
    task = endless.task(LOWER)
    task.reserved_tokens = QUANTUM

    task.count_tokens(1, 0.0, excluded=3)

    assert task.reserved_tokens == QUANTUM - 4


def test_a_follower_gets_no_reserved_quantum() -> None:
    endless = Endless(slots=1, count=3)
    endless.iterate(endless.bench.submit(LOWER, "low", priority=Priority.LOW))
    follower = endless.task(LOWER)
    follower.follows = True
    tasks, assignment = endless.engine.tasks, endless.engine.assignment
    tasks.clock.now = endless.bench.now + 2 * PASSED_OVER_S
    assignment._reserve_quantum([follower])
    assert not follower.reserved_tokens
    tasks.clock.now += 1
    follower.follows = False
    assignment._reserve_quantum([follower])
    assert follower.reserved_tokens == QUANTUM


def test_a_low_text_is_embedded_beside_endless_urgent_ones() -> None:
    endless = Endless(slots=1, count=200)
    endless.embeds = True
    endless.iterate(
        endless.bench.submit(LOWER, "w" * 100, priority=Priority.LOW, embed=EmbedSpec())
    )

    endless.iterate_until_computed(LOWER, 3 * BATCH_SIZE)
    for _ in range(5):
        endless.iterate()

    assert isinstance(endless.bench.end(LOWER), m.Finished), "it was not displaced halfway"


def test_a_reader_that_was_away_did_not_wait() -> None:
    endless = Endless(slots=1, count=2)
    low = endless.bench.submit(LOWER, "low", priority=Priority.LOW, pull=True)
    endless.count = 0
    endless.iterate(low)
    for _ in range(20):
        endless.iterate()
    endless.count = 2
    while endless.bench.now < 100 + 2 * PASSED_OVER_S:
        endless.iterate()
    endless.bench.iterate(m.PullToken(LOWER))

    assert endless.task(LOWER).passed_over_since >= 100 + 2 * PASSED_OVER_S

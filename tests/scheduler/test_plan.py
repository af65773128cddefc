"""Who gets a slot, who gives it up, what goes into a batch: decided without model or clock."""

from __future__ import annotations

from inferd.backends import SamplingParams
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.plan import (
    Limits,
    OwnerClock,
    plan_rows,
    plan_slots,
)
from inferd.scheduler.slots import Slot, choose_source, common_prefix
from inferd.scheduler.task import Task, TaskState

LIMITS = Limits(ageing_tokens=1000, quantum_tokens=100)


def task(number: int, *, tokens: int = 10, owner: int = 1, priority: int = 1) -> Task:
    spec = TaskSpec(
        id=number,
        owner=owner,
        tokens=pack_tokens(range(tokens)),
        sampling=SamplingParams(),
        priority=priority,
    )
    return Task.from_spec(spec, arrival=number, clock=0, now=0.0)


def running(slot: Slot, it: Task, computed: int = 0) -> Task:
    slot.task, it.slot, it.state, it.computed = it, slot.index, TaskState.RUNNING, computed
    return it


def slots_of(count: int) -> list[Slot]:
    return [Slot(i) for i in range(count)]


def test_a_higher_class_comes_first_then_who_was_served_least_then_who_came_first() -> None:
    owners = OwnerClock()
    owners.add(7, 500)
    low, late, early = task(1, priority=0), task(3), task(2)
    greedy, urgent = task(0, owner=7), task(4, priority=3)

    plan = plan_slots(
        [low, late, early, greedy, urgent], slots_of(5), owners, clock=0, limits=LIMITS, now=0.0
    )

    assert plan.admit == (urgent, early, late, greedy, low)


def test_a_waiting_task_rises_by_one_class_per_ageing_tokens_but_not_past_urgent() -> None:
    it = task(1, priority=0)

    assert it.effective_class(999, 1000) == 0
    assert it.effective_class(2000, 1000) == 2
    assert it.effective_class(10**9, 1000) == 3


def test_a_running_task_does_not_age() -> None:
    it = running(Slot(0), task(1, priority=0))

    assert it.effective_class(10**9, 1000) == 0


def test_an_urgent_task_takes_the_slot_of_the_newest_of_the_lowest() -> None:
    slots = slots_of(2)
    first, second = running(slots[0], task(1, priority=0)), running(slots[1], task(2, priority=0))
    urgent = task(3, priority=3)

    plan = plan_slots([urgent], slots, OwnerClock(), 0, LIMITS, 0.0)

    assert plan.park == (second,)
    assert plan.admit == (urgent,)
    assert first not in plan.park


def test_an_aged_task_does_not_preempt_before_a_quantum_ends() -> None:
    slots = slots_of(1)
    runner = running(slots[0], task(1, priority=2, owner=1))
    aged = task(2, priority=0, owner=2)
    owners = OwnerClock()
    owners.add(1, 5000)

    before = plan_slots([aged], slots, owners, 2000, LIMITS, 0.0)
    runner.quantum = LIMITS.quantum_tokens
    after = plan_slots([aged], slots, owners, 2000, LIMITS, 0.0)

    assert before.park == ()
    assert after.park == (runner,)


def test_a_task_whose_reader_is_absent_gives_way_to_anybody() -> None:
    slots = slots_of(1)
    runner = running(slots[0], task(1, priority=3))
    runner.unread_since = 10.0
    low = task(2, priority=0)

    soon = plan_slots([low], slots, OwnerClock(), 0, LIMITS, 10.1)
    later = plan_slots([low], slots, OwnerClock(), 0, LIMITS, 10.2)

    assert soon.park == ()
    assert later.park == (runner,)


def test_a_returning_owner_has_no_credit_from_idleness() -> None:
    owners = OwnerClock()
    owners.add(1, 1000)

    owners.arrive(2, active=[1])

    assert owners.served(2) == 1000


def test_rows_ascend_by_slot_and_fit_the_batch() -> None:
    slots = slots_of(3)
    running(slots[0], task(1, tokens=50))
    running(slots[1], task(2, tokens=5), computed=5).tokens.append(1)
    running(slots[2], task(3, tokens=50))

    rows = plan_rows(slots, OwnerClock(), 0, LIMITS, batch_size=64)

    assert [(r.task.slot, r.count) for r in rows] == [(0, 50), (1, 1), (2, 13)]


def test_a_prompt_takes_less_beside_a_decoding_task_of_its_class_but_not_beside_a_lower() -> None:
    limits = Limits(prefill_rows_beside_decode=16)
    slots = slots_of(2)
    running(slots[0], task(1, tokens=100))
    decoding = running(slots[1], task(2, tokens=5), computed=5)
    decoding.tokens.append(1)

    equal = plan_rows(slots, OwnerClock(), 0, limits, 64)
    slots[1].task = running(slots[1], task(3, tokens=5, priority=0), computed=5)
    slots[1].task.tokens.append(1)
    lower = plan_rows(slots, OwnerClock(), 0, limits, 64)

    assert [r.count for r in equal] == [16, 1]
    assert [r.count for r in lower] == [63, 1]


def test_idle_kv_is_found_by_its_longest_prefix_and_never_across_owners() -> None:
    slots = slots_of(3)
    slots[0].tokens, slots[0].owner = list(range(5)), 1
    slots[1].tokens, slots[1].owner = list(range(8)), 1
    slots[2].tokens, slots[2].owner = list(range(10)), 2

    plan = choose_source(task(1, tokens=10, owner=1), slots)

    assert (plan.target, plan.source, plan.keep) == (0, 1, 8)


def test_the_last_token_is_always_decoded_again() -> None:
    slots = slots_of(1)
    slots[0].tokens, slots[0].owner = list(range(10)), 1

    assert choose_source(task(1, tokens=10, owner=1), slots).keep == 9


def test_kv_that_serves_only_a_part_is_copied_where_there_is_room() -> None:
    slots = slots_of(2)
    slots[0].tokens, slots[0].owner = list(range(20)), 1

    assert choose_source(task(1, tokens=10, owner=1), slots).spare == 1
    assert choose_source(task(1, tokens=30, owner=1), slots).spare is None


def test_common_prefix_counts_equal_tokens() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix(list(range(1000)), [*range(777), -1]) == 777

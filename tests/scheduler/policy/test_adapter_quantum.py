"""Groups of tasks that cannot share a batch alternate in the order of the queue; none starves."""

from __future__ import annotations

from itertools import groupby

from inferd.scheduler import Limits
from inferd.scheduler.kv.slots import Slot
from inferd.scheduler.policy.adapter_quantum import GROUPS_MAX, GroupQuantum, plan_group
from inferd.scheduler.policy.plan import OwnerClock, plan_tokens
from inferd.scheduler.priority import Priority
from inferd.scheduler.task import Group, Task
from tests.scheduler.doubles import Bench
from tests.scheduler.policy.test_plan import LIMITS, Known, decoding, order, slots_of, task

NONE, A, B = Group(), Group(("a",)), Group(("b",))
QUANTUM = LIMITS.quantum_tokens


def filled() -> list[Slot]:
    """Return three slots with a task of each group."""
    slots = slots_of(3)
    for slot, group in zip(slots, (NONE, A, B), strict=True):
        decoding(slot, task(slot.index + 1, adapters=group.adapters))
    return slots


def tasks_of(slots: list[Slot]) -> list[Task]:
    return [slot.task for slot in slots if slot.task is not None]


def after(slots: list[Slot], quantum: GroupQuantum, owners: OwnerClock | None = None) -> Group:
    return plan_group(tasks_of(slots), order(owners), LIMITS, quantum)


def test_a_batch_has_tokens_of_only_one_group() -> None:
    slots = filled()

    for slot, group in zip(slots, (NONE, A, B), strict=True):
        rows = plan_tokens(slots, order(), LIMITS, 64, Known(0.01), group)
        assert [r.task for r in rows] == [slot.task]


def test_a_group_has_the_steps_for_a_quantum() -> None:
    slots = filled()

    assert after(slots, GroupQuantum(NONE, QUANTUM - 1)) == NONE
    assert after(slots, GroupQuantum(NONE, QUANTUM)) == A
    assert after(slots, GroupQuantum(Group(("gone",)), 0)) == NONE
    slots[0].task = slots[1].task = None
    assert after(slots, GroupQuantum(B, 10 * QUANTUM)) == B, "there is no other group"


def test_all_groups_alternate() -> None:
    slots, quantum, seen = filled(), GroupQuantum(), []

    for _ in range(9):
        seen.append(quantum.group)
        quantum = quantum.with_tokens(QUANTUM)
        quantum = quantum.pass_to(after(slots, quantum))

    assert seen == [NONE, A, B] * 3, "the last group starves"


def test_a_higher_class_is_next_at_once_and_a_lower_one_waits_to_age() -> None:
    slots = filled()
    urgent = decoding(slots[2], task(9, adapters=B.adapters, priority=Priority.URGENT))

    assert after(slots, GroupQuantum(NONE, 1)) == B
    assert after(slots, GroupQuantum(B, QUANTUM)) == B
    slots[0].task = None
    aged = slots[1].task
    assert aged is not None
    aged.age = 2 * LIMITS.ageing_tokens
    assert after(slots, GroupQuantum(B, QUANTUM - 1)) == B
    assert after(slots, GroupQuantum(B, QUANTUM)) == A, "it has aged to the urgent class"
    urgent.computed = len(urgent.tokens)
    assert after(slots, GroupQuantum(B, 1)) == A, "the urgent task has no work"


def test_a_group_of_an_owner_served_more_waits_for_others() -> None:
    slots, owners = slots_of(2), OwnerClock()
    decoding(slots[0], task(1, owner=1))
    decoding(slots[1], task(2, owner=2, adapters=A.adapters))
    owners.add_tokens(2, 500)

    assert after(slots, GroupQuantum(NONE, QUANTUM), owners) == NONE
    owners.add_tokens(1, 500)
    assert after(slots, GroupQuantum(NONE, QUANTUM), owners) == A


def test_no_more_groups_are_remembered_than_there_can_be() -> None:
    quantum = GroupQuantum()
    for number in range(GROUPS_MAX + 10):
        quantum = quantum.pass_to(Group((str(number),)))

    assert len(quantum.previous) == GROUPS_MAX
    assert quantum.order_of(quantum.previous[-1]) == GROUPS_MAX - 1 and quantum.order_of(NONE) == -1


def test_three_adapter_sets_alternate_and_answer_correctly() -> None:
    bench = Bench(slots=3, limits=Limits(quantum_tokens=8))
    text = "A Text that goes On and On, so that All have some Turns"
    answers = {(): text, ("upper",): text.upper(), ("lower",): text.lower()}
    steps: list[tuple[str, ...]] = []
    compute = bench.model.step

    def step(chunks: list[object]) -> None:
        steps.append(bench.model.adapters.chosen)
        compute(chunks)  # type: ignore[arg-type]

    bench.model.step = step  # type: ignore[method-assign, assignment]

    bench.run(*(bench.submit(i, text, adapters=adapters) for i, adapters in enumerate(answers)))

    for i, expected in enumerate(answers.values()):
        assert bench.text(i).decode() == expected
    turns = [adapters for adapters, _ in groupby(steps)]
    assert len(turns) > 9
    assert turns[:9] == [*answers] * 3, "a late adapter set waits until the others end"

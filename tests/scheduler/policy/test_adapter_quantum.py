"""Tasks with different adapters alternate in the order of the queue; none starves."""

from __future__ import annotations

from itertools import groupby

from inferd.scheduler import EngineSettings
from inferd.scheduler.kv.slots import Slot
from inferd.scheduler.owner import Owner, OwnerClock, Priority
from inferd.scheduler.policy.batch_plan import (
    ADAPTER_SETS_MAX,
    AdapterQuantum,
    plan_adapters,
    plan_tokens,
)
from tests.scheduler.doubles import Bench
from tests.scheduler.policy.test_plan import (
    SETTINGS,
    Known,
    decoding,
    order,
    slots_of,
    task,
    tasks_of,
)

NONE, A, B = (), ("a",), ("b",)
QUANTUM = SETTINGS.quantum_tokens


def filled() -> list[Slot]:
    """Return three slots with a task of each adapter set."""
    slots = slots_of(3)
    for slot, adapters in zip(slots, (NONE, A, B), strict=True):
        decoding(slot, task(slot.index + 1, adapters=adapters))
    return slots


def after(
    slots: list[Slot], quantum: AdapterQuantum, owners: OwnerClock | None = None
) -> tuple[str, ...]:
    return plan_adapters(tasks_of(slots), order(owners), SETTINGS, quantum)


def test_a_batch_has_tokens_of_only_one_adapter_set() -> None:
    slots = filled()

    for slot, adapters in zip(slots, (NONE, A, B), strict=True):
        rows = plan_tokens(tasks_of(slots), order(), SETTINGS, 64, Known(0.01), adapters)
        assert [r.task for r in rows] == [slot.task]


def test_an_adapter_set_has_the_steps_for_a_quantum() -> None:
    slots = filled()

    assert after(slots, AdapterQuantum(NONE, QUANTUM - 1)) == NONE
    assert after(slots, AdapterQuantum(NONE, QUANTUM)) == A
    assert after(slots, AdapterQuantum(("removed",), 0)) == NONE
    slots[0].task = slots[1].task = None
    assert after(slots, AdapterQuantum(B, 10 * QUANTUM)) == B, "there is no other set"


def test_all_adapter_sets_alternate() -> None:
    slots, quantum, seen = filled(), AdapterQuantum(), []

    for _ in range(9):
        seen.append(quantum.adapters)
        quantum = quantum.with_tokens(QUANTUM)
        quantum = quantum.pass_to(after(slots, quantum))

    assert seen == [NONE, A, B] * 3, "the last set starves"


def test_a_higher_class_is_next_at_once_and_a_lower_one_waits_to_age() -> None:
    slots = filled()
    urgent = decoding(slots[2], task(9, adapters=B, priority=Priority.URGENT))

    assert after(slots, AdapterQuantum(NONE, 1)) == B
    assert after(slots, AdapterQuantum(B, QUANTUM)) == B
    slots[0].task = None
    aged = slots[1].task
    assert aged is not None
    aged.age = 2 * SETTINGS.ageing_tokens
    assert after(slots, AdapterQuantum(B, QUANTUM - 1)) == B
    assert after(slots, AdapterQuantum(B, QUANTUM)) == A, "it has aged to the urgent class"
    urgent.computed = len(urgent.tokens)
    assert after(slots, AdapterQuantum(B, 1)) == A, "the urgent task has no work"


def test_the_adapters_of_an_owner_served_more_wait_for_others() -> None:
    slots, owners = slots_of(2), OwnerClock()
    decoding(slots[0], task(1, owner=1))
    decoding(slots[1], task(2, owner=2, adapters=A))
    owners.count_work(Owner(2), 500)

    assert after(slots, AdapterQuantum(NONE, QUANTUM), owners) == NONE
    owners.count_work(Owner(1), 500)
    assert after(slots, AdapterQuantum(NONE, QUANTUM), owners) == A


def test_no_more_adapter_sets_are_remembered_than_there_can_be() -> None:
    quantum = AdapterQuantum()
    for number in range(ADAPTER_SETS_MAX + 10):
        quantum = quantum.pass_to((str(number),))

    assert len(quantum.previous) == ADAPTER_SETS_MAX
    assert (
        quantum.order_of(quantum.previous[-1]) == ADAPTER_SETS_MAX - 1
        and quantum.order_of(NONE) == -1
    )


def test_three_adapter_sets_alternate_and_answer_correctly() -> None:
    bench = Bench(slots=3, settings=EngineSettings(quantum_tokens=8))
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

"""Slots: which task leases which sequence of the model, what KV lies idle in the others, and what
was saved of the parked ones.

Owned by the engine. There is one way to move state: save it, restore it into a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..backends import Model
from .task import Task

__all__ = ("Admission", "Slot", "SlotTable", "choose_source", "common_prefix", "least_used")


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence of the model: leased by a task, or idle with the KV of `tokens`."""

    index: int
    task: Task | None = None
    tokens: list[int] = field(default_factory=list)
    owner: int = -1
    used: int = 0
    """The token clock when it was last given back: the smallest is the least recently used."""


@dataclass(frozen=True, slots=True)
class Admission:
    """*task* takes slot *target*, the lowest free one, and starts from the first *keep* tokens of
    slot *source*. With *spare*, the source is copied there first, for it is worth keeping whole.
    """

    task: Task
    target: int
    source: int
    keep: int
    spare: int | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens *a* and *b* begin with alike."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:  # halving compares slices in C: 20 times faster than a loop over tokens
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def choose_source(task: Task, slots: Sequence[Slot]) -> Admission:
    """Choose where *task* goes (the lowest free slot) and which idle KV it starts from.

    KV is never reused across owners. A slot that the task extends whole is taken; one that it
    shares a part with is copied where another can be given up for it: an empty one, or the least
    recently used.
    """
    idle = [s for s in slots if s.task is None]
    target, spare = idle[0], least_used(idle)
    best, shared = None, 0
    for slot in idle:
        if slot.owner == task.spec.owner and slot.tokens:
            size = common_prefix(slot.tokens, task.tokens)
            if size > shared:
                best, shared = slot, size
    keep = min(shared, len(task.tokens) - 1)  # the last token is decoded again, for its logits
    if best is None or keep <= 0:
        return Admission(task, target.index, spare.index, 0)
    copy = shared < len(best.tokens) and spare is not best
    return Admission(task, target.index, best.index, keep, spare.index if copy else None)


def least_used(idle: Sequence[Slot]) -> Slot:
    """Return the idle slot whose KV is given up first: an empty one, else the oldest."""
    return min(idle, key=lambda s: (bool(s.tokens), s.used, -s.index))


class SlotTable:
    """The slots of one model, and the states of parked tasks, at most *parked_bytes_max* of them.

    Leased slots are kept without gaps from the lowest on: rows of a batch must ascend by
    sequence without gaps, or llama.cpp cuts the batch into several (measured: 66 → 92 ms with 16
    sequences).
    """

    def __init__(self, model: Model, parked_bytes_max: int):
        self.slots = [Slot(i) for i in range(model.info.slots)]
        self.parked_bytes = 0
        self._model = model
        self._parked_bytes_max = parked_bytes_max
        self._parked: dict[int, tuple[bytes, object]] = {}

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def tasks(self) -> list[Task]:
        """The tasks that lease a slot, by slot."""
        return [s.task for s in self.slots if s.task is not None]

    @property
    def free(self) -> bool:
        """Tell whether a slot is free."""
        return any(s.task is None for s in self.slots)

    def admit(self, task: Task) -> None:
        """Give *task* the lowest free slot, with its parked state or what idle KV serves it."""
        saved = self._parked.pop(task.spec.id, None)
        if saved is None or not self._restore(task, *saved):
            self._place(task)

    def _restore(self, task: Task, state: bytes, row: object) -> bool:
        self.parked_bytes -= len(state)
        idle = [s for s in self.slots if s.task is None]
        slot, spare = idle[0], least_used(idle)
        if spare is not slot:
            self._swap(spare, slot)
        slot.tokens = []
        if not self._model.restore(slot.index, state):
            task.row = False
            return False
        if task.row:
            self._model.put_row(slot.index, row)
        _lease(slot, task)
        return True

    def _place(self, task: Task) -> None:
        plan = choose_source(task, self.slots)
        source, target = self.slots[plan.source], self.slots[plan.target]
        if plan.spare is not None and self._copy(source, spare := self.slots[plan.spare]):
            source = target if source is target else spare
        if source is not target:
            self._swap(source, target)
        task.computed = self._model.trim(target.index, plan.keep)
        _lease(target, task)

    def _copy(self, source: Slot, spare: Slot) -> bool:
        """Copy idle KV into *spare*, whose own is given up; False if it does not fit there."""
        spare.tokens, spare.owner, spare.used = [], source.owner, source.used
        if not self._model.restore(spare.index, self._model.save(source.index)):
            return False
        spare.tokens = source.tokens
        return True

    def _swap(self, a: Slot, b: Slot) -> None:
        self._model.swap(a.index, b.index)
        a.task, b.task = b.task, a.task
        a.tokens, b.tokens = b.tokens, a.tokens
        a.owner, b.owner = b.owner, a.owner
        a.used, b.used = b.used, a.used
        for slot in (a, b):
            if slot.task is not None:
                slot.task.slot = slot.index

    def give_back(self, task: Task, clock: int) -> None:
        """Leave the task's KV in its slot, for whoever extends it."""
        slot = self.slots[task.slot]
        slot.task, slot.tokens, slot.used = None, task.tokens[: task.computed], clock
        task.slot = -1

    def clear(self, task: Task) -> None:
        """Forget the KV of a task whose step has failed."""
        task.computed = self._model.trim(task.slot, 0)
        task.row = False

    def park(self, task: Task, clock: int) -> bool:
        """Save the task's state and give its slot back; False if there is no room for it."""
        row = self._model.take_row(task.slot) if task.row else None
        state = self._model.save(task.slot)
        if self.parked_bytes + len(state) > self._parked_bytes_max:
            if task.row:
                self._model.put_row(task.slot, row)
            return False
        self._parked[task.spec.id] = (state, row)
        self.parked_bytes += len(state)
        self.give_back(task, clock)
        return True

    def forget(self, task: Task) -> None:
        """Drop the state of a parked task that has ended."""
        state, _ = self._parked.pop(task.spec.id, (b"", None))
        self.parked_bytes -= len(state)

    def close_gaps(self) -> None:
        """Move the highest leased slot into the lowest free one below it, until there is none."""
        while (tasks := self.tasks) and tasks[-1].slot >= len(tasks):
            gap = next(s for s in self.slots if s.task is None)
            self._swap(self.slots[tasks[-1].slot], gap)

    def hold_rows(self, stepping: set[int]) -> None:
        """Keep the rows of logits that the next step, over the slots *stepping*, would lose."""
        for task in self.tasks:
            if task.row and task.slot not in stepping:
                self._model.hold(task.slot)

    def check_integrity(self, parked: set[int]) -> None:
        """Assert that every lease is mutual and that just the tasks *parked* are saved."""
        assert all(self.slots[t.slot].task is t for t in self.tasks)
        assert set(self._parked) == parked
        assert self.parked_bytes == sum(len(state) for state, _ in self._parked.values())


def _lease(slot: Slot, task: Task) -> None:
    slot.task, slot.owner, slot.tokens = task, task.spec.owner, []
    task.slot = slot.index

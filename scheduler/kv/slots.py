"""The slots of one model: the tasks that occupy them, and the KV in idle ones."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ...backends import LanguageModel
from ..task import Task
from .store import Origin

_NO_ORIGIN = Origin(scope=-2)


@dataclass(eq=False, slots=True)
class Slot:
    """A sequence of the model: occupied by a task, or idle with the KV of `tokens`."""

    index: int
    task: Task | None = None
    tokens: array[int] = field(default_factory=lambda: array("i"))
    origin: Origin = _NO_ORIGIN
    saved: bool = False
    """The idle KV was saved ahead; see `IdleStates.save_ahead`."""


class SlotTable:
    """The slots and the tasks in them. Owned by the engine.

    Occupied slots stay adjacent: the sequences of a batch must ascend without gaps, or llama.cpp
    splits the batch (measured: 66 → 92 ms with 16 sequences).
    """

    def __init__(self, model: LanguageModel):
        self.slots = [Slot(i) for i in range(model.info.slots)]
        self.tasks: tuple[Task, ...] = ()
        """The tasks that have a slot, by slot. Every step reads them several times."""
        self.changes = 0
        """Number of changes to the contents of idle slots."""
        self._model = model

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def idle(self) -> list[Slot]:
        """The slots without a task."""
        return [s for s in self.slots if s.task is None]

    def nearest_free(self) -> Slot:
        """Return the free slot nearest to the occupied ones, an empty one first."""
        occupied = [t.slot for t in self.tasks] or [0]
        low, high = occupied[0], occupied[-1]

        def rank(slot: Slot) -> tuple[int, bool]:
            return max(low - slot.index, slot.index - high, 0), bool(slot.tokens)

        return min(self.idle, key=rank)

    def assign_slot(self, slot: Slot, task: Task) -> None:
        """Give *slot* to *task*, whose state is in it."""
        self.changes += 1
        slot.tokens, slot.origin = array("i"), task.origin
        task.slot = slot.index
        self._set_task(slot, task)

    def _set_task(self, slot: Slot, task: Task | None) -> None:
        slot.task = task
        self.tasks = tuple(s.task for s in self.slots if s.task is not None)

    def release_slot(self, task: Task, *, keep: bool = True) -> None:
        """Free the task's slot; with *keep* its KV stays there, for a task that extends it."""
        slot = self.slots[task.slot]
        self._set_task(slot, None)
        slot.origin, slot.saved = task.origin, False
        self.changes += 1
        task.slot = -1
        if keep and not task.shift_pending:
            slot.tokens = array("i", task.tokens[: task.computed])
        else:
            self.clear_slot(slot)

    def clear_slot(self, slot: Slot) -> None:
        """Drop the KV of an idle slot."""
        self.changes += 1
        self._model.trim(slot.index, 0)
        slot.tokens = array("i")

    def clear_task(self, task: Task) -> None:
        """Clear the KV of a task whose step has failed, or that is parked without its state."""
        task.computed = self._model.trim(task.slot, 0)
        task.has_logits = task.shift_pending = False

    def swap_slots(self, a: Slot, b: Slot) -> None:
        """Exchange two slots, with their contents and tasks."""
        self._model.swap(a.index, b.index)
        a_task, b_task = a.task, b.task
        self._set_task(a, b_task)
        self._set_task(b, a_task)
        a.tokens, b.tokens = b.tokens, a.tokens
        a.origin, b.origin = b.origin, a.origin
        a.saved, b.saved = b.saved, a.saved
        for slot in (a, b):
            if slot.task is not None:
                slot.task.slot = slot.index

    def close_gaps(self) -> None:
        """Move occupied slots together, with as few moves as possible."""
        occupied = [t.slot for t in self.tasks]
        if not occupied or occupied[-1] - occupied[0] < len(occupied):
            return
        starts = range(len(self.slots) - len(occupied) + 1)
        runs = [range(start, start + len(occupied)) for start in starts]
        run = max(runs, key=lambda run: sum(slot in run for slot in occupied))
        free = [s for s in self.idle if s.index in run]
        for task in [t for t in self.tasks if t.slot not in run and not t.shift_pending]:
            self.swap_slots(self.slots[task.slot], free.pop())

    def hold_logits(self, stepping: set[int]) -> None:
        """Save the logits that the next step, over the slots *stepping*, would overwrite."""
        for task in self.tasks:
            if task.has_logits and task.slot not in stepping:
                self._model.hold_logits(task.slot)

    def check_integrity(self) -> None:
        """Assert that tasks and slots name each other, and that the model has their tokens."""
        assert all(self.slots[t.slot].task is t for t in self.tasks)
        assert len(self.tasks) == len(self.slots) - len(self.idle)
        for slot in self.slots:
            size = slot.task.computed if slot.task is not None else len(slot.tokens)
            assert self._model.length(slot.index) == size, f"slot {slot.index}"

"""The slots of one model: the tasks that occupy them, the KV in idle ones, and the search for the
state in a slot or in memory that covers most of a task's tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ...backends import LanguageModel
from ...backends.media import cut_point
from ..prefix import common_prefix
from ..task import Task
from .store import KvStore, Origin, SavedState, covered_tokens

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
        self.drafts_cut_states = False
        """Whether drafts could not be removed without the tokens before the step, which are then
        computed again. No cause is known.
        """
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
        if task.drafts:
            self.drop_drafts(task)
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
        task.drafts = []

    def drop_drafts(self, task: Task) -> None:
        """Remove the drafts of *task* from its slot, with all logits. If all of its tokens were
        computed, the last one is removed, too, so that its logits are computed again. A memory that
        can only go back to before the step computes the accepted drafts again, as a chunk.
        """
        keep = task.computed - (task.pending == 0)
        task.drafts, task.has_logits = [], False
        task.computed = self._model.trim(task.slot, keep)
        if task.computed < keep:
            task.forced_behind += keep - task.computed
            self.drafts_cut_states |= not (self._model.info.keeps_states and task.computed)

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
        assert all(self.slots[t.slot].task is t and not t.drafts for t in self.tasks)
        assert len(self.tasks) == len(self.slots) - len(self.idle)
        for slot in self.slots:
            size = slot.task.computed if slot.task is not None else len(slot.tokens)
            assert self._model.length(slot.index) == size, f"slot {slot.index}"


COPY_TOKENS_MIN = 16
"""A running task's state is copied if it covers this many tokens more than another source."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """A state from which a task can start: the first *keep* tokens of a slot or saved state. That
    of a hybrid may first have to be cut back to a *checkpoint*.
    """

    keep: int = 0
    slot: Slot | None = None
    saved: SavedState | None = None
    checkpoint: SavedState | None = None

    @property
    def approximate(self) -> bool:
        """Whether the state was shifted."""
        holder = self.saved or (self.slot and (self.slot.task or self.slot))
        return holder is not None and holder.origin.approximate

    @property
    def tier(self) -> str:
        """The tier of the state: a slot, memory, or the disk if it was not used since its read."""
        if self.saved is None:
            return "slot"
        return "disk" if self.saved.fetched else "memory"


class StateSearch:
    """Finds states by tokens and origin. Owned by the engine."""

    def __init__(self, model: LanguageModel, slots: SlotTable, store: KvStore):
        self._model, self._slots, self._store = model, slots, store
        self._kv_kind = model.info.kv_kind

    def find_source(self, origin: Origin, tokens: array[int]) -> KvSource:
        """Return the source that covers most of *tokens*. Among equals it is an idle slot, which
        need not be copied.
        """
        best = KvSource()
        for slot in self._slots.idle:
            if slot.origin.serves(origin):
                keep = covered_tokens(slot.tokens, tokens, "plain", best.keep)
                if keep == len(slot.tokens) or keep >= self._model.trim_min(slot.index):
                    best = KvSource(keep, slot=slot) if keep else best
        saved, keep = self._store.find_state(origin, tokens, best.keep)
        if saved is not None:
            best = KvSource(keep, saved=saved)
        if self._kv_kind == "plain":
            best = self._find_running(origin, tokens, best)
        elif self._kv_kind == "hybrid":
            best = self._find_cut(origin, tokens, best)
        return best

    def _find_running(self, origin: Origin, tokens: array[int], best: KvSource) -> KvSource:
        """Return a running task's slot if it covers enough more than *best* to copy it."""
        for task in self._slots.tasks:
            at = best.keep + COPY_TOKENS_MIN
            if min(task.computed, len(tokens) - 1) <= at or task.tokens[at] != tokens[at]:
                continue
            if task.origin.serves(origin) and not task.shift_pending:
                done = array("i", task.tokens[: task.computed])
                keep = covered_tokens(done, tokens, "plain", at)
                best = KvSource(keep, slot=self._slots.slots[task.slot]) if keep else best
        return best

    def _find_cut(self, origin: Origin, tokens: array[int], best: KvSource) -> KvSource:
        """Return a hybrid's state with a checkpoint at which it can be cut, if that covers more
        than *best*.
        """
        for checkpoint in reversed(self._store.checkpoints_in(origin, tokens[:-1])):
            keep = len(checkpoint.tokens)
            if keep <= best.keep:
                break
            source = self._find_text(origin, checkpoint, best.keep + COPY_TOKENS_MIN < keep)
            if source is not None:
                return source
        return best

    def _find_text(self, origin: Origin, checkpoint: SavedState, copies: bool) -> KvSource | None:
        """Return a source whose text begins with that of *checkpoint*: an idle slot, a saved state
        or, with *copies*, the slot of a running task.
        """
        text = checkpoint.tokens
        keep = len(text)
        for slot in self._slots.idle:
            if slot.origin.serves(origin) and _begins_with(slot.tokens, text):
                return KvSource(keep, slot=slot, checkpoint=checkpoint)
        for saved in self._store:
            whole = self._store.is_whole(saved) and saved.origin.serves(origin)
            if whole and _begins_with(saved.tokens, text):
                return KvSource(keep, saved=saved, checkpoint=checkpoint)
        for task in self._slots.tasks if copies else ():
            serves = task.computed >= keep and task.origin.serves(origin)
            if serves and task.tokens[keep - 1] == text[-1] and task.tokens[:keep] == list(text):
                slot = self._slots.slots[task.slot]
                return KvSource(keep, slot=slot, checkpoint=checkpoint)
        return None

    def longest_text(self, origin: Origin, tokens: array[int]) -> int:
        """Return how many of *tokens* a hybrid's states in slots and memory begin with."""
        known = [(s.origin, s.tokens) for s in self._slots.idle]
        known += [(s.origin, s.tokens) for s in self._store if self._store.is_whole(s)]
        serving = (have for whose, have in known if whose.serves(origin))
        return max((common_prefix(have, tokens) for have in serving), default=0)

    def shared_prefix(self, origin: Origin, tokens: array[int]) -> int:
        """Return the length of the longest prefix of *tokens* that was computed or soon will be.

        On models that can only use whole states, a checkpoint is worthwhile where prompts diverge.
        """
        known = [(s.origin, s.tokens) for s in self._slots.idle]
        known += [(t.origin, array("i", t.tokens)) for t in self._slots.tasks]
        known += [(s.origin, s.tokens) for s in self._store]
        serving = (have for whose, have in known if whose.serves(origin))
        longest = max((common_prefix(have, tokens) for have in serving), default=0)
        return cut_point(tokens, longest)

    @property
    def changes(self) -> int:
        """Number of changes in idle slots and in memory, which may change what is found."""
        return self._slots.changes + self._store.changes


def _begins_with(tokens: array[int], text: array[int]) -> bool:
    """Return whether *tokens* begin with *text*; its last token is compared first, which is cheap
    and mostly enough.
    """
    keep = len(text)
    return len(tokens) >= keep and tokens[keep - 1] == text[-1] and tokens[:keep] == text

"""KV states of tasks: restored when a task gets a slot, saved when it is parked.

The KV of idle slots is saved ahead, or before another task overwrites it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from ...backends import LanguageModel
from ..prefix import equal_runs
from ..task import Task
from .slots import KvSource, Slot, SlotTable, StateSearch
from .store import KvStore, Origin, SavedState

SAVE_TOKENS_MIN = 16
"""Fewer tokens are not saved, because computing them again is one small step."""
AHEAD_BYTES_MAX = 64 << 20
"""A larger state is not saved ahead, because an arriving task would wait for it too long."""


class IdleStates:
    """Saves the KV of idle slots into the store. Owned by the engine.

    *recompute_s* estimates the seconds that computing a number of tokens again takes.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: SlotTable,
        store: KvStore,
        recompute_s: Callable[[int], float],
    ):
        self._model, self._slots, self._store = model, slots, store
        self._recompute_s = recompute_s
        self._token_bytes = 1.0
        """Bytes per token of the last saved state."""

    def vacate(self, slot: Slot) -> None:
        """Prepare an idle slot to be overwritten: move its KV to an empty slot, or save it."""
        empty = next((s for s in self._slots.idle if not s.tokens), None)
        if slot.tokens and empty is not None and not self._store.covers(slot.origin, slot.tokens):
            self._slots.swap_slots(slot, empty)
        elif slot.tokens:
            self.save_slot(slot)
            slot.tokens = array("i")

    def save_slot(self, slot: Slot) -> None:
        """Save an idle slot's KV, unless it is small or saved already."""
        if len(slot.tokens) < SAVE_TOKENS_MIN or self._store.covers(slot.origin, slot.tokens):
            return
        state = self._model.save(slot.index)
        self._token_bytes = max(1.0, len(state) / len(slot.tokens))
        self._store.add_state(slot.origin, slot.tokens, state, self._recompute_s(len(slot.tokens)))

    @property
    def unsaved(self) -> Slot | None:
        """An idle slot whose KV may be worth saving before a task needs the slot."""
        if self._store.low_memory:
            return None
        free = min(AHEAD_BYTES_MAX, self._store.bytes_max - self._store.bytes)
        for slot in self._slots.idle:
            if not slot.saved and SAVE_TOKENS_MIN <= len(slot.tokens) <= free / self._token_bytes:
                return slot
        return None

    def save_ahead(self) -> None:
        """Save the KV of one idle slot while there is no other work."""
        slot = self.unsaved
        if slot is not None:
            self.save_slot(slot)
            slot.saved = True

    def save_and_clear_all(self) -> bool:
        """Save the KV of all idle slots and clear these slots; return whether any had KV."""
        filled = [s for s in self._slots.idle if s.tokens]
        for slot in filled:
            self.save_slot(slot)
            self._slots.clear_slot(slot)
        return bool(filled)

    def slots_of(self, scope: int, session: str) -> list[Slot]:
        """Return the idle slots with KV of a session."""
        idle = [s for s in self._slots.idle if s.tokens]
        return [s for s in idle if (s.origin.scope, s.origin.session) == (scope, session)]


class TaskStates:
    """Moves states into and out of slots, and holds those of parked tasks, which are pinned in
    *store*. Owned by the engine. For *recompute_s* see `IdleStates`.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: SlotTable,
        store: KvStore,
        idle: IdleStates,
        search: StateSearch,
        recompute_s: Callable[[int], float],
    ):
        self.reused = {"slot": 0, "memory": 0, "disk": 0}
        """Tokens that tasks did not have to compute, by the tier of the states."""
        self.restores = 0
        """States that were loaded into a slot."""
        self._model, self._slots, self._store = model, slots, store
        self._idle, self._search = idle, search
        self._kv_kind = model.info.kv_kind
        self._recompute_s = recompute_s
        self._parked: dict[int, tuple[SavedState | None, object]] = {}

    # Starts.

    def assign_slot(self, task: Task) -> None:
        """Give *task* a free slot, with its parked state or the best other source."""
        target = self._slots.nearest_free()
        saved, logits = self._parked.pop(task.spec.id, (None, None))
        if saved is None or not self._unpark(task, target, saved, logits):
            task.has_logits = False
            tokens = array("i", task.tokens)
            source = KvSource()
            if not task.ignores_cache:
                source = self._search.find_source(task.origin, tokens)
            approximate, tier, origin = source.approximate, source.tier, task.origin
            if source.slot is not None and source.slot.task is None:
                target, origin = source.slot, source.slot.origin
            task.computed = self._start(task, target, source)
            if self._kv_kind in ("recurrent", "hybrid") and source.checkpoint is None:
                self._add_checkpoint(target.index, origin, tokens[: task.computed])
            if task.started_at is None:
                self.reused[tier] += task.computed
            task.shifted |= approximate and task.computed > 0
        self._slots.assign_slot(target, task)

    def _unpark(self, task: Task, target: Slot, saved: SavedState, logits: object) -> bool:
        """Load a parked task's own state into *target*; return False if it no longer fits."""
        self._idle.vacate(target)
        fits = self._restore(target, saved.state)
        if fits and task.has_logits:
            self._model.put_logits(target.index, logits)
        self._store.unpin(saved, spent=True)
        return fits

    def _start(self, task: Task, target: Slot, source: KvSource) -> int:
        """Load the state of *source* into *target*; return its number of tokens."""
        checkpoint = source.checkpoint
        if checkpoint is not None:
            checkpoint.pins += 1  # saving the slot's KV must not evict it
        if source.saved is not None:
            have = self._load_saved(target, source.saved)
        elif source.slot is not None and source.slot.task is not None:
            have = self._copy_running(source.slot.task, target)
        elif source.slot is not None:
            have = self._take_over(target, source.keep)
        else:
            self._idle.vacate(target)
            have = array("i")
        keep = min(source.keep, len(have))
        if checkpoint is not None:
            keep = self._cut(target, checkpoint) if keep == source.keep else 0
            self._store.unpin(checkpoint)
        reused = self._reuse(task, target, have, keep) if task.spec.cache_reuse else 0
        return reused or self._model.trim(target.index, keep)

    def _cut(self, target: Slot, checkpoint: SavedState) -> int:
        """Cut a hybrid's state back to *checkpoint*; return its number of tokens, or 0."""
        if not self._model.restore_checkpoint(target.index, checkpoint.state):
            return 0
        self._store.count_hit(checkpoint)
        return len(checkpoint.tokens)

    def _load_saved(self, target: Slot, saved: SavedState) -> array[int]:
        saved.pins += 1  # saving the slot's KV must not evict it
        self._idle.vacate(target)
        fits = self._restore(target, saved.state)
        if fits:
            self._store.count_hit(saved)
        self._store.unpin(saved)
        return saved.tokens if fits else array("i")

    def _copy_running(self, task: Task, target: Slot) -> array[int]:
        """Copy a running task's state through the store, where other tasks may use it, too."""
        self._idle.vacate(target)
        tokens, state = self._save_running(task)
        return tokens if self._restore(target, state) else array("i")

    def _take_over(self, slot: Slot, keep: int) -> array[int]:
        """Reuse idle KV. Save it first if the task drops a part of it, or if the model, once it has
        extended the KV, cannot cut it back to this state. (Of recurrent models and hybrids, this
        state is kept as a checkpoint.)
        """
        if len(slot.tokens) - keep >= SAVE_TOKENS_MIN or self._kv_kind == "window":
            self._idle.save_slot(slot)
        return slot.tokens

    def _reuse(self, task: Task, target: Slot, have: array[int], keep: int) -> int:
        """Move equal runs of *have*, behind the common prefix, to their places in *task*. Return
        how many tokens the task then has.
        """
        if self._kv_kind != "plain" or not self._model.info.can_shift or task.items:
            return 0
        runs = equal_runs(have, array("i", task.tokens), keep, task.spec.cache_reuse)
        if not runs:
            return 0
        self._model.reuse(target.index, [(0, 0, keep), *runs] if keep else runs)
        task.shifted = task.shift_pending = True
        return keep + sum(count for _, _, count in runs)

    def _restore(self, target: Slot, state: bytes) -> bool:
        fits = self._model.restore(target.index, state)
        self.restores += fits
        return fits

    # Running and parked tasks.

    def save_checkpoint(self, task: Task) -> None:
        """Save a running task's present state, for tasks that share this prefix."""
        tokens = array("i", task.tokens[: task.computed])
        if self._kv_kind in ("recurrent", "hybrid"):
            self._add_checkpoint(task.slot, task.origin, tokens)
        elif len(tokens) >= SAVE_TOKENS_MIN and not self._store.covers(task.origin, tokens):
            self._save_running(task)

    def _add_checkpoint(self, index: int, origin: Origin, tokens: array[int]) -> None:
        """Save a checkpoint of the slot *index*, which has *tokens*, unless there is one."""
        if len(tokens) < SAVE_TOKENS_MIN or self._store.has_checkpoint(origin, tokens):
            return
        state = self._model.save_checkpoint(index)
        self._store.add_checkpoint(origin, tokens, state, self._recompute_s)

    def _save_running(self, task: Task) -> tuple[array[int], bytes]:
        state = self._model.save(task.slot)
        tokens = array("i", task.tokens[: task.computed])
        self._store.add_state(task.origin, tokens, state, self._recompute_s(len(tokens)))
        return tokens, state

    def park_task(self, task: Task, *, force: bool = False) -> bool:
        """Save the task's state and take its slot back. If memory cannot hold the state, return
        False, or with *force* drop the state, which is then computed again.
        """
        if task.shift_pending and not force:
            return False
        saved = None
        if task.computed and not task.shift_pending:
            state, seconds = self._model.save(task.slot), self._recompute_s(task.computed)
            tokens = task.tokens[: task.computed]
            saved = self._store.add_state(task.origin, tokens, state, seconds, pin=True)
            if saved is None and not force:
                return False
        if saved is None:
            self._slots.clear_task(task)
        logits = self._model.take_logits(task.slot) if task.has_logits else None
        self._parked[task.spec.id] = (saved, logits)
        self._slots.release_slot(task, keep=False)
        return True

    def drop_parked(self, task: Task) -> None:
        """Unpin the state of a parked task that has ended: others may use it."""
        saved, _ = self._parked.pop(task.spec.id, (None, None))
        if saved is not None:
            self._store.unpin(saved)

    def check_integrity(self, parked: set[int]) -> None:
        """Assert that exactly the tasks *parked* are held, and their states pinned."""
        assert set(self._parked) == parked
        pinned = [s for s, _ in self._parked.values() if s is not None]
        assert sorted(map(id, pinned)) == sorted(id(s) for s in self._store if s.pins)

"""The search for the state in a slot or in memory that covers most of a task's tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ...backends import LanguageModel
from ...backends.media import cut_point
from ..prefix import common_prefix
from .slots import Slot, SlotTable
from .store import KvStore, Origin, SavedState, covered_tokens

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
            if slot.origin.serves(origin) and slot.tokens[:keep] == text:
                return KvSource(keep, slot=slot, checkpoint=checkpoint)
        for saved in self._store:
            whole = self._store.is_whole(saved) and saved.origin.serves(origin)
            if whole and saved.tokens[:keep] == text:
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

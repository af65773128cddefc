"""The KV of idle slots, which is saved ahead or before another task overwrites it."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from ...backends import LanguageModel
from .slots import Slot, SlotTable
from .store import KvStore

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

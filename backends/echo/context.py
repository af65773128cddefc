"""The echo model's slots: their tokens, and simulated KV cells and logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..base import ModelInfo
from ..batch import Chunk, Move, check_chunks, length_moved, shift_moves
from ..errors import BackendError, KvFull, UnsupportedOperation
from ..media import is_entry, text_tokens
from .options import EchoOptions

_WHOLE_ONLY = "recurrent", "hybrid"
"""The kinds of memory that `trim` cannot cut."""


@dataclass(slots=True)
class EchoSlot:
    """One sequence. `first_cell` is the first of its tokens whose cell the window still holds.
    `scored` are the positions of the last step that have logits.
    """

    tokens: list[int] = field(default_factory=list)
    first_cell: int = 0
    adapters: tuple[str, ...] = ()
    shifted: bool = False
    has_logits: bool = False
    rollback: int = 0
    """The tokens at its end that can be dropped although its memory cannot be cut."""
    kept: int = 0
    """The tokens to which it can go back; 0 if its state was not kept."""
    keeps: bool = False
    """Its state was kept since the last step."""
    scored: range = range(0)
    has_media: bool = False


class _State(msgspec.Struct, array_like=True):
    tokens: list[int]
    first_cell: int
    adapters: tuple[str, ...]


def _has_media(tokens: Sequence[int]) -> bool:
    return is_entry(min(tokens, default=0))


class EchoContext:
    """The part of the echo model that keeps its slots; see `LanguageModel`."""

    def __init__(self, info: ModelInfo, options: EchoOptions):
        self.slots = [EchoSlot() for _ in range(info.slots)]
        self.info, self._options = info, options

    def check_batch(self, chunks: Sequence[Chunk], adapters: tuple[str, ...]) -> None:
        """Check that a step with *adapters* may decode *chunks*."""
        info, lengths = self.info, {i: len(slot.tokens) for i, slot in enumerate(self.slots)}
        check_chunks(
            chunks,
            lengths,
            info.batch_size,
            info.ctx_size,
            info.vocab_size,
            info.logits_max,
            info.media_format,
        )
        for chunk in chunks:
            slot = self.slots[chunk.slot]
            assert self._can_continue(slot, chunk.position), "cells of the window are missing"
            assert slot.adapters == adapters or not slot.tokens, "mixed adapters in one slot"
        self._check_cells(sum(len(c.tokens) for c in chunks))
        for slot in self.slots:
            slot.scored, slot.rollback = range(0), 0
            slot.kept, slot.keeps = slot.kept if slot.keeps else 0, False

    def _check_cells(self, tokens: int) -> None:
        used, cells = sum(len(s.tokens) for s in self.slots), self._options.kv_cells
        if 0 <= cells < used + tokens:
            raise KvFull(f"{used} of {cells} KV cells are used: {tokens} more do not fit")

    def append(self, chunk: Chunk, adapters: tuple[str, ...]) -> EchoSlot:
        """Append a checked chunk to its slot, and return the slot."""
        slot = self.slots[chunk.slot]
        slot.tokens.extend(chunk.tokens)
        slot.rollback = min(self._options.rollback, len(chunk.tokens) - 1)
        slot.has_media |= is_entry(chunk.tokens[0])
        slot.adapters, slot.shifted, slot.has_logits = adapters, False, chunk.logits > 0
        slot.scored = range(len(slot.tokens) - chunk.logits, len(slot.tokens))
        if self._options.memory == "window":
            cells = self._options.window + self.info.batch_size
            slot.first_cell = max(slot.first_cell, len(slot.tokens) - cells)
        return slot

    def _can_continue(self, slot: EchoSlot, keep: int) -> bool:
        """Return whether llama.cpp's memory could decode on after *keep* tokens."""
        if self._options.memory in _WHOLE_ONLY:
            return len(slot.tokens) - slot.rollback <= keep
        return slot.first_cell <= max(0, keep - self._options.window)

    def hold_logits(self, slot: int) -> None:
        """Do nothing: the echo model never loses logits."""
        assert self.slots[slot].has_logits

    def check_logits(self, slot: int, position: int | None) -> None:
        """Check that there are logits after the token at *position*, or after the last token."""
        sequence = self.slots[slot]
        found = sequence.has_logits if position is None else position in sequence.scored
        if not found:
            where = "" if position is None else f" after token {position}"
            raise BackendError(f"slot {slot} has no logits{where}")

    def use_logits(self, slot: int, position: int | None) -> Sequence[int]:
        """Drop the logits up to those after *position*, or all. Return the text before them."""
        self.check_logits(slot, position)
        sequence, last = self.slots[slot], len(self.slots[slot].tokens) - 1
        position = last if position is None else position
        sequence.scored = range(position + 1, sequence.scored.stop)
        sequence.has_logits = position < last
        tokens = sequence.tokens if position == last else sequence.tokens[: position + 1]
        return text_tokens(tokens) if sequence.has_media else tokens

    def take_logits(self, slot: int) -> object:
        """Move the slot's logits out, which have no contents."""
        self.use_logits(slot, None)
        return None

    def put_logits(self, slot: int, logits: object) -> None:
        """Put logits back."""
        self.slots[slot].has_logits = True

    def trim(self, slot: int, keep: int) -> int:
        """Drop all but the first *keep* tokens, or all if the memory cannot keep a part of them."""
        sequence = self.slots[slot]
        sequence.has_logits, sequence.scored = False, range(0)
        keep = min(keep, len(sequence.tokens))
        if keep > 0 and not self._can_continue(sequence, keep):
            keep = sequence.kept if sequence.kept <= keep else 0
        if keep <= 0:
            self.slots[slot] = EchoSlot()
            return 0
        if keep < len(sequence.tokens):
            del sequence.tokens[keep:]
            sequence.rollback = 0
            sequence.kept = sequence.kept if sequence.kept <= keep else 0
        return keep

    def keep_states(self, slots: Sequence[int]) -> None:
        """Keep the numbers of tokens of *slots*."""
        for sequence in (self.slots[slot] for slot in slots):
            if self._options.keeps_states:
                sequence.kept, sequence.keeps = len(sequence.tokens), True

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return len(self.slots[slot].tokens)

    def trim_min(self, slot: int) -> int:
        """Return the least number of tokens that `trim` can leave."""
        sequence = self.slots[slot]
        length, window = len(sequence.tokens), self._options.window
        if self._options.memory in _WHOLE_ONLY:
            return length
        return min(length, sequence.first_cell + window if sequence.first_cell else 1)

    def shift(self, slot: int, keep: int, discard: int) -> None:
        """Drop *discard* tokens after the first *keep*."""
        self.reuse(slot, shift_moves(self.length(slot), keep, discard))

    def reuse(self, slot: int, moves: Sequence[Move]) -> None:
        """Keep the runs of tokens that *moves* name."""
        if not self.info.can_shift:
            raise UnsupportedOperation(f"a {self.info.kv_kind} memory cannot be shifted")
        sequence = self.slots[slot]
        if not length_moved(len(sequence.tokens), moves):
            self.trim(slot, 0)
            return
        sequence.tokens = [
            t for begin, _, count in moves for t in sequence.tokens[begin : begin + count]
        ]
        sequence.shifted |= any(begin != to for begin, to, _ in moves)
        sequence.has_logits, sequence.scored = False, range(0)

    def swap(self, a: int, b: int) -> None:
        """Exchange two slots."""
        self._check_saved(a, b)
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]

    def save(self, slot: int) -> bytes:
        """Return the slot's state; *window* memory saves only cells in the next token's window."""
        self._check_saved(slot)
        sequence, first_cell = self.slots[slot], 0
        if self._options.memory == "window":
            first_cell = max(sequence.first_cell, len(sequence.tokens) - self._options.window)
        return msgspec.msgpack.encode(_State(sequence.tokens, first_cell, sequence.adapters))

    def save_checkpoint(self, slot: int) -> bytes:
        """Return a checkpoint. That of a hybrid has the slot's text, to compare it later."""
        if self._options.memory not in _WHOLE_ONLY:
            raise UnsupportedOperation(f"a {self.info.kv_kind} memory has no checkpoints")
        return self.save(slot)

    def restore_checkpoint(self, slot: int, checkpoint: bytes) -> bool:
        """Cut a slot back to a checkpoint; return False if that is damaged."""
        sequence = self.slots[slot]
        sequence.has_logits, sequence.scored = False, range(0)
        try:
            saved = msgspec.msgpack.decode(checkpoint, type=_State)
        except msgspec.DecodeError:
            self.trim(slot, 0)
            return False
        assert self._options.memory == "hybrid", "only a hybrid can be cut back"
        assert sequence.tokens[: len(saved.tokens)] == saved.tokens, "it is of another text"
        assert sequence.adapters == saved.adapters, "it is of other adapters"
        del sequence.tokens[len(saved.tokens) :]
        sequence.kept = sequence.kept if sequence.kept <= len(saved.tokens) else 0
        sequence.has_media = _has_media(saved.tokens)
        return True

    def _check_saved(self, *slots: int) -> None:
        for slot in slots:
            if self.slots[slot].shifted:
                raise BackendError(f"slot {slot} was shifted and not decoded into since")

    def restore(self, slot: int, state: bytes) -> bool:
        """Load a saved state into a slot; return False if *state* is damaged or does not fit."""
        self.trim(slot, 0)
        try:
            saved = msgspec.msgpack.decode(state, type=_State)
            self._check_cells(len(saved.tokens))
        except (msgspec.DecodeError, KvFull):
            return False
        if len(saved.tokens) > self.info.ctx_size:
            return False
        self.slots[slot] = EchoSlot(
            saved.tokens,
            saved.first_cell,
            saved.adapters,
            has_media=_has_media(saved.tokens),
        )
        return True

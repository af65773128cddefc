"""The echo model's embeddings: a token's row depends on the token and on those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..batch import Chunk
from ..embedder import EmbedInfo, Pool, check_pooling
from .faults import EchoFaults

EMBEDDING_SIZE = 16


def echo_rows(tokens: Sequence[int], before: Sequence[float] = ()) -> list[list[float]]:
    """Return the rows of *tokens*, of which the row *before* stands before the first."""
    rows, last = [], list(before) or [0.0] * EMBEDDING_SIZE
    for token in tokens:
        last = [0.5 * x + math.sin((token + 1) * (k + 1)) for k, x in enumerate(last)]
        rows.append(last)
    return rows


class _Slot:
    def __init__(self, pooling: str):
        self.pool = Pool(pooling)
        self.tokens: list[int] = []
        self.last: list[float] = []


class EchoEmbedder:
    """See `Embedder`; its steps have the pauses and *faults* of the model's."""

    def __init__(self, faults: EchoFaults, info: EmbedInfo):
        self._faults, self._info = faults, info
        self._slots: dict[int, _Slot] = {}

    @property
    def info(self) -> EmbedInfo:
        """What it can do."""
        return self._info

    def begin(self, slot: int, pooling: str) -> None:
        """Empty a slot for another text."""
        assert 0 <= slot < self._info.slots
        self._slots[slot] = _Slot(check_pooling(self._info, pooling))

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots, after the pauses and faults of the options."""
        slots = [c.slot for c in chunks]
        assert slots == sorted(set(slots)), f"chunks not in ascending slots: {slots}"
        assert 0 < sum(len(c.tokens) for c in chunks) <= self._info.rows_max
        for chunk in chunks:
            assert chunk.slot in self._slots, f"slot {chunk.slot} has no text"
            held = self._slots[chunk.slot]
            assert chunk.tokens and chunk.position == len(held.tokens), "a gap in the positions"
            held.tokens += chunk.tokens
        assert sum(len(s.tokens) for s in self._slots.values()) <= self._info.tokens_max
        self._faults.begin_step()
        for chunk in chunks:
            held = self._slots[chunk.slot]
            self._faults.abort_on_text(held.tokens)
            rows = echo_rows(chunk.tokens, held.last)
            held.last = rows[-1]
            held.pool.add(rows)

    def take(self, slot: int, normalize: int) -> bytes:
        """Return what the slot's text has become, and empty the slot."""
        return self._slots.pop(slot).pool.result(normalize)

    def drop(self, slot: int) -> None:
        """Empty a slot."""
        self._slots.pop(slot, None)

"""Embeddings of the echo model: a token's vector depends on the token and those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..batch import Chunk
from ..embedder import EmbeddingSlots, EmbedInfo
from .options import EchoFaults
from .vocabulary import VOCAB_SIZE

EMBEDDING_SIZE = 16


def echo_vectors(tokens: Sequence[int], before: Sequence[float] = ()) -> list[list[float]]:
    """Return the vectors of *tokens*; *before* is the vector of the token before the first."""
    vectors, last = [], list(before) or [0.0] * EMBEDDING_SIZE
    for token in tokens:
        last = [0.5 * x + math.sin((token + 1) * (k + 1)) for k, x in enumerate(last)]
        vectors.append(last)
    return vectors


class EchoEmbedder(EmbeddingSlots):
    """The echo model's `Embedder`. Its steps have the same *faults* as the model's."""

    def __init__(self, faults: EchoFaults, info: EmbedInfo):
        super().__init__(info, VOCAB_SIZE)
        self._faults = faults
        self._tokens: dict[int, list[int]] = {}
        self._last: dict[int, list[float]] = {}
        """The vector of each slot's last token."""

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Compute one batch, after the pauses and faults of the options."""
        self.check_batch(chunks)
        self._faults.count_step()
        for chunk in chunks:
            tokens = self._tokens.setdefault(chunk.slot, [])
            tokens += chunk.tokens
            self._faults.abort_on_tokens(tokens)
            vectors = echo_vectors(chunk.tokens, self._last.get(chunk.slot, ()))
            self._last[chunk.slot] = vectors[-1]
            self.add_vectors(chunk, vectors)

    def clear_slot(self, slot: int) -> None:
        """Clear a slot."""
        self._tokens.pop(slot, None)
        self._last.pop(slot, None)
        super().clear_slot(slot)

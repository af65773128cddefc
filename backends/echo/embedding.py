"""Embeddings of the echo model: a token's vector depends on the token and those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..batch import Chunk, check_chunks
from ..embedder import EmbedInfo, Pool, check_pooling
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


class _Text:
    def __init__(self, pooling: str):
        self.pool = Pool(pooling)
        self.tokens: list[int] = []
        self.last: list[float] = []


class EchoEmbedder:
    """The echo model's `Embedder`. Its steps have the same *faults* as the model's."""

    def __init__(self, faults: EchoFaults, info: EmbedInfo):
        self._faults, self.info = faults, info
        self._slots: dict[int, _Text] = {}

    def start_text(self, slot: int, pooling: str) -> None:
        """Clear a slot for another text."""
        assert 0 <= slot < self.info.slots
        self._slots[slot] = _Text(check_pooling(self.info, pooling))

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Append the chunks to their slots, after the pauses and faults of the options."""
        check_chunks(
            chunks,
            {slot: len(text.tokens) for slot, text in self._slots.items()},
            tokens_max=self.info.batch_tokens_max,
            length_max=self.info.tokens_max,
            vocab_size=VOCAB_SIZE,
        )
        for chunk in chunks:
            self._slots[chunk.slot].tokens += chunk.tokens
        assert sum(len(text.tokens) for text in self._slots.values()) <= self.info.tokens_max
        self._faults.count_step()
        for chunk in chunks:
            text = self._slots[chunk.slot]
            self._faults.abort_on_text(text.tokens)
            vectors = echo_vectors(chunk.tokens, text.last)
            text.last = vectors[-1]
            text.pool.add_vectors(vectors)

    def take_embedding(self, slot: int, normalize: int) -> bytes:
        """Return the embedding of the slot's text, and clear the slot."""
        return self._slots.pop(slot).pool.result(normalize)

    def clear_slot(self, slot: int) -> None:
        """Clear a slot."""
        self._slots.pop(slot, None)

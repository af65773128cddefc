"""The `Embedder` protocol, and the pooling of token embeddings into the vector of a text.

The names and numbers are llama-server's. This module does not use numpy: `echo` runs without it.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .batch import Chunk, check_chunks
from .errors import BackendError, UnsupportedOperation

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""In the order of llama.cpp's numbers, 0 … 4."""
EMBED_BATCH_TOKENS = 64
"""Tokens of a step; few, as llama.cpp computes logits for each of them, 1 MB each on Gemma 3."""
EMBED_SLOTS = 16
"""Texts in parallel."""
EMBEDDING_BYTES_MAX = 2 << 20
"""Bytes of the largest embedding of one text, as float32: without pooling, 455 tokens of 1152
numbers. As JSON it fits a frame.
"""
NORMALIZE_MAX = 32
_INT16_RANGE = 32760.0


class EmbedSpec(msgspec.Struct, frozen=True):
    """Options of an embedding. *pooling* is one of `POOLINGS`, or empty for the model's own.

    *normalize* is -1 for no norm, 0 to make the largest number 32760, 1 for the taxicab norm, 2 for
    the euclidean one, and p > 2 for the p-norm.
    """

    pooling: str = ""
    normalize: int = 2


class EmbedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings that a model makes."""

    size: int
    """Numbers of a vector."""
    slots: int
    """Texts in parallel."""
    batch_tokens_max: int
    """Tokens of a step."""
    tokens_max: int
    """Tokens of a text, and of all texts in the slots together."""
    pooling: str = "mean"
    """The pooling of requests that name none."""
    whole: bool = False
    """Whether a text must be in one step, because each token attends to all others."""


def check_pooling(info: EmbedInfo, pooling: str) -> str:
    """Return *pooling*, or the model's own if *pooling* is empty.

    :raises UnsupportedOperation: the model cannot do this pooling.
    """
    wanted = pooling or info.pooling
    if (wanted == "rank") != (info.pooling == "rank"):
        raise UnsupportedOperation(
            f"the model's own pooling is {info.pooling}: it cannot do {wanted}",
            hint="only reranking models do rank, and they do nothing else; leave pooling out",
            data={"pooling": wanted, "own": info.pooling},
        )
    return wanted


class Embedder(Protocol):
    """A model's second context, which makes embeddings independently of the first.

    The model's thread calls it. A slot holds a text from `start_text` until `take_embedding` or
    `clear_slot`.
    """

    @property
    def info(self) -> EmbedInfo:
        """The sizes and the pooling of the embeddings."""

    def start_text(self, slot: int, pooling: str) -> None:
        """Clear a slot for another text, which is pooled by *pooling*."""

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Compute one batch: chunks in ascending slots, at most `batch_tokens_max` tokens in all.

        :raises BackendError: the batch failed; the caller must clear its slots.
        """

    def take_embedding(self, slot: int, normalize: int) -> bytes:
        """Return the embedding of the slot's text as float32, and clear the slot."""

    def clear_slot(self, slot: int) -> None:
        """Clear a slot."""


class Pool:
    """Pools the token embeddings of one text into a vector; without pooling, collects them all."""

    def __init__(self, pooling: str):
        self._pooling = pooling
        self._sums: list[float] = []
        self._vectors: list[Sequence[float]] = []
        self._count = 0

    def add_vectors(self, vectors: Sequence[Sequence[float]]) -> None:
        """Add the embeddings of the next tokens; the pool owns them from then on."""
        if self._pooling == "mean":
            for vector in vectors:
                sums = self._sums
                self._sums = list(map(operator.add, sums, vector)) if sums else list(vector)
        elif self._pooling == "none":
            self._vectors += [array("f", vector) for vector in vectors]
        elif self._pooling == "cls":
            self._vectors = self._vectors or [vectors[0]]
        else:
            self._vectors = [vectors[-1]]
        self._count += len(vectors)

    def result(self, normalize: int) -> bytes:
        """Return the embedding as float32. As in llama-server, unpooled embeddings and ranks are
        not normalised.
        """
        if self._pooling in ("none", "rank"):
            return b"".join(array("f", vector).tobytes() for vector in self._vectors)
        mean = self._pooling == "mean"
        vector = [x / self._count for x in self._sums] if mean else self._vectors[0]
        return normalized(vector, normalize).tobytes()


def normalized(vector: Sequence[float], kind: int) -> array[float]:
    """Return *vector* normalised as `common_embd_normalize` does it; see `EmbedSpec`."""
    largest = max(map(abs, vector), default=0.0)
    if kind < 0 or largest == 0:
        return array("f", vector)
    if kind == 0:
        norm = largest / _INT16_RANGE
    elif kind == 2:
        norm = math.hypot(*vector)
    else:  # divided by the largest first, because powers of small numbers underflow
        norm = largest * math.fsum((abs(x) / largest) ** kind for x in vector) ** (1 / kind)
    return array("f", [x / norm for x in vector])


class EmbeddingSlots:
    """The slots of an `Embedder`: the length and the pool of each slot's text."""

    def __init__(self, info: EmbedInfo, vocab_size: int):
        self.info = info
        self._vocab_size = vocab_size
        self._pools: dict[int, Pool] = {}
        self._lengths: dict[int, int] = {}

    def start_text(self, slot: int, pooling: str) -> None:
        """Clear a slot for another text."""
        if not 0 <= slot < self.info.slots:
            raise BackendError(f"slot {slot} is not one of {self.info.slots}")
        self.clear_slot(slot)
        self._pools[slot] = Pool(check_pooling(self.info, pooling))
        self._lengths[slot] = 0

    def check_batch(self, chunks: Sequence[Chunk]) -> None:
        """Check a batch; see `check_chunks`."""
        most, step_most = self.info.tokens_max, self.info.batch_tokens_max
        check_chunks(chunks, self._lengths, step_most, most, self._vocab_size, step_most)
        total = sum(self._lengths.values()) + sum(len(chunk.tokens) for chunk in chunks)
        if total > most:
            raise BackendError(f"{total} tokens in all slots; {most} at most")

    def add_vectors(self, chunk: Chunk, vectors: Sequence[Sequence[float]]) -> None:
        """Add the embeddings of a chunk's tokens to its text."""
        self._pools[chunk.slot].add_vectors(vectors)
        self._lengths[chunk.slot] += len(chunk.tokens)

    def take_embedding(self, slot: int, normalize: int) -> bytes:
        """Return the embedding of the slot's text, and clear the slot."""
        result = self._pools[slot].result(normalize)
        self.clear_slot(slot)
        return result

    def clear_slot(self, slot: int) -> None:
        self._pools.pop(slot, None)
        self._lengths.pop(slot, None)

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
PREFIXES = 4
"""Prefixes whose KV state is kept for further texts."""
_INT16_RANGE = 32760.0


class EmbedSpec(msgspec.Struct, frozen=True):
    """Options of an embedding. *pooling* is one of `POOLINGS`, or empty for the model's own.

    *normalize* is -1 for no norm, 0 to make the largest number 32760, 1 for the taxicab norm, 2 for
    the euclidean one, and p > 2 for the p-norm.
    """

    pooling: str = ""
    normalize: int = 2
    shared: int = 0
    """The first tokens that other texts may have too: their KV state is kept for these."""


QUERY, DOCUMENT = b"{query}", b"{document}"
"""The fields of a `RankPart`."""


class RankPart(msgspec.Struct, frozen=True):
    """A part of the prompt with which a reranking model scores a document: *tokens*, or *texts* and
    fields that are tokenized as one text, in which names of special tokens are plain text.
    """

    tokens: tuple[int, ...] = ()
    texts: tuple[bytes, ...] = ()


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
    prefixes: int = 0
    """The number of prefixes that `Embedder.keep_prefix` can keep."""
    rank_parts: tuple[RankPart, ...] = ()
    """The prompt of a reranking model; empty for other models."""
    rank_is_probability: bool = False
    """Whether the scores of a reranking model are probabilities."""


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

    def keep_prefix(self, place: int, slot: int, tokens: int) -> None:
        """Keep the state of the first *tokens* of a slot's text at one of `EmbedInfo.prefixes`
        places, instead of what is there.

        :raises BackendError: the slot does not have that state; the place is then empty.
        """

    def copy_prefix(self, place: int, slot: int, tokens: int) -> None:
        """Begin the text of a slot in which nothing was computed with the first *tokens* of the
        prefix at *place*.

        :raises BackendError: the place does not have them; the slot must be cleared.
        """

    def clear_prefix(self, place: int) -> None:
        """Clear a place of prefixes."""

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
        self._prefixes: dict[int, int] = {}
        """The tokens of each kept prefix, by its place."""

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
        held = *self._lengths.values(), *self._prefixes.values()
        total = sum(held) + sum(len(chunk.tokens) for chunk in chunks)
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

    def keep_prefix(self, place: int, slot: int, tokens: int) -> None:
        """Count a kept prefix; see `Embedder.keep_prefix`."""
        self.clear_prefix(place)
        if not 0 <= place < self.info.prefixes:
            raise BackendError(f"place {place} is not one of {self.info.prefixes}")
        if not 0 < tokens <= self._lengths.get(slot, 0):
            raise BackendError(f"slot {slot} does not have {tokens} tokens")
        self._prefixes[place] = tokens

    def copy_prefix(self, place: int, slot: int, tokens: int) -> None:
        """Count the tokens of a prefix in a slot; see `Embedder.copy_prefix`."""
        if self._lengths.get(slot) != 0 or not 0 < tokens <= self._prefixes.get(place, 0):
            raise BackendError(f"slot {slot} cannot begin with {tokens} tokens of prefix {place}")
        self._lengths[slot] = tokens

    def clear_prefix(self, place: int) -> None:
        self._prefixes.pop(place, None)

    def clear_slot(self, slot: int) -> None:
        self._pools.pop(slot, None)
        self._lengths.pop(slot, None)

"""Embeddings: what makes them, and how the rows of a text become its vector.

The names and numbers are llama-server's. There is no numpy in here: `echo` ships without it.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .batch import Chunk
from .errors import UnsupportedOperation

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""By llama.cpp's numbers: 0 … 4."""
EMBED_ROWS = 64
"""Rows of a step: llama.cpp computes logits for each of them, 1 MB a row on Gemma 3."""
EMBED_SLOTS = 16
"""Texts side by side."""
EMBEDDING_BYTES_MAX = 2 << 20
"""Of one text, as float32: 455 tokens of 1152 numbers without pooling. As JSON it fits a frame."""
NORMALIZE_MAX = 32
_INT16_RANGE = 32760.0


class EmbedSpec(msgspec.Struct, frozen=True):
    """What is to be made of a text. *pooling* is one of `POOLINGS`, or empty: the model's own.

    *normalize*: -1 not, 0 the greatest number is 32760, 1 taxicab, 2 euclidean, p > 2 p-norm.
    """

    pooling: str = ""
    normalize: int = 2


class EmbedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes embeddings."""

    size: int
    """Numbers of a vector."""
    slots: int
    """Texts side by side."""
    rows_max: int
    """Tokens of a step."""
    tokens_max: int
    """Tokens of a text, and of all those side by side."""
    pooling: str = "mean"
    """What is done where a request names none."""
    whole: bool = False
    """A text goes into one step: each token looks at all others."""


def check_pooling(info: EmbedInfo, pooling: str) -> str:
    """Return the pooling that is done: *pooling*, or the model's own for an empty one.

    :raises UnsupportedOperation: the model cannot.
    """
    wanted = pooling or info.pooling
    if (wanted == "rank") != (info.pooling == "rank"):
        raise UnsupportedOperation(
            f"the model's own pooling is {info.pooling}: it cannot do {wanted}",
            hint="rank is done by reranking models, and they do nothing else; leave pooling out",
            data={"pooling": wanted, "own": info.pooling},
        )
    return wanted


class Embedder(Protocol):
    """A model's second context, in which embeddings are made; its first one knows nothing of it.

    Driven by the thread of its model. A slot holds a text from `begin` on, until `take` or `drop`.
    """

    @property
    def info(self) -> EmbedInfo:
        """What it can do."""

    def begin(self, slot: int, pooling: str) -> None:
        """Empty a slot for another text, whose rows become one by *pooling*."""

    def step(self, chunks: Sequence[Chunk]) -> None:
        """Compute one batch: chunks in ascending slots, in all at most `rows_max` rows.

        :raises BackendError: nothing of the batch counts; the slots in it are to be dropped.
        """

    def take(self, slot: int, normalize: int) -> bytes:
        """Return what the slot's text has become, as float32, and empty the slot."""

    def drop(self, slot: int) -> None:
        """Empty a slot."""


class Pool:
    """The rows of one text on their way to a vector, or, without pooling, all of them."""

    def __init__(self, pooling: str):
        self._pooling = pooling
        self._sums: list[float] = []
        self._rows: list[Sequence[float]] = []
        self._count = 0

    def add(self, rows: Sequence[Sequence[float]]) -> None:
        """Take the rows that follow; they are the caller's no more."""
        if self._pooling == "mean":
            for row in rows:
                self._sums = list(map(operator.add, self._sums, row)) if self._sums else list(row)
        elif self._pooling == "none":
            self._rows += [array("f", row) for row in rows]
        elif self._pooling == "cls":
            self._rows = self._rows or [rows[0]]
        else:
            self._rows = [rows[-1]]
        self._count += len(rows)

    def result(self, normalize: int) -> bytes:
        """Return the vector, or the rows, as float32. Rows and ranks are not normalised, as in
        llama-server.
        """
        if self._pooling == "mean":
            return normalized([x / self._count for x in self._sums], normalize).tobytes()
        if self._pooling in ("none", "rank"):
            return b"".join(array("f", row).tobytes() for row in self._rows)
        return normalized(self._rows[0], normalize).tobytes()


def normalized(vector: Sequence[float], kind: int) -> array[float]:
    """Return *vector* normalised as `common_embd_normalize` does it; see `EmbedSpec`."""
    largest = max(map(abs, vector), default=0.0)
    if kind < 0 or largest == 0:
        return array("f", vector)
    if kind == 0:
        norm = largest / _INT16_RANGE
    elif kind == 2:
        norm = math.hypot(*vector)
    else:  # by the largest first: the powers of small numbers vanish
        norm = largest * math.fsum((abs(x) / largest) ** kind for x in vector) ** (1 / kind)
    return array("f", [x / norm for x in vector])

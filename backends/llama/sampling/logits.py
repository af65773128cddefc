"""What is looked up in a row of logits: the likeliest tokens, and how likely a token is."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...base import TokenProbs

__all__ = ("LIKELY_MAX", "among", "before_sampling", "likely")

Row = NDArray[np.float32]
Ids = NDArray[np.intp]

COLUMNS = 4096
LIKELY_MAX = 1024
"""More are no short list; `likely` finds a few more than asked for."""
_LOWEST = float(np.finfo(np.float32).min)
"""Stands for the logarithm of 0, as in llama-server: JSON has no infinity."""


def likely(row: Row, count: int) -> Ids | None:
    """Return tokens, ascending, among which are the *count* likeliest ones; None where these are no
    small part of all.

    The row is looked at as a table. As many columns as are sought have a highest logit of at least
    the bound: so many tokens do, and only in those columns are there any. Reads the row once: with
    262k tokens 30 times faster than `numpy.argpartition`.
    """
    lines = len(row) // COLUMNS
    if lines < 4 or not 0 < count <= LIKELY_MAX:
        return None
    table, rest = row[: lines * COLUMNS].reshape(lines, COLUMNS), row[lines * COLUMNS :]
    highest = table.max(axis=0)
    bound = np.partition(highest, COLUMNS - count)[COLUMNS - count]
    columns = np.flatnonzero(highest >= bound)
    line, place = np.nonzero(table[:, columns] >= bound)
    found = np.concatenate(
        (line * COLUMNS + columns[place], np.flatnonzero(rest >= bound) + lines * COLUMNS)
    )
    # Not a number compares with nothing; a flat row has all of its tokens at the bound.
    return found if count <= len(found) <= 4 * LIKELY_MAX else None


def before_sampling(row: Row, token: int, count: int) -> TokenProbs:
    """Return the logarithms of what the model's own probabilities are of *token* and of the *count*
    likeliest tokens, whatever is sampled.
    """
    found = likely(row, count)
    ids = np.arange(len(row)) if found is None else found
    ids = ids[np.argsort(-row[ids], kind="stable")[:count]]
    high = row[ids[0]]
    total = float(high) + math.log(float(np.exp(row - high).sum(dtype=np.float64)))
    top = [(int(i), _bounded(float(row[i]) - total)) for i in ids]
    return TokenProbs(token, _bounded(float(row[token]) - total), top)


def _bounded(logarithm: float) -> float:
    return max(_LOWEST, min(0.0, logarithm))


def among(ids: NDArray[np.int32], probabilities: Row, token: int, count: int) -> TokenProbs:
    """Return how likely *token* was among the candidates that a chain has left, and the *count*
    likeliest ones of them.
    """
    order = np.argsort(-probabilities, kind="stable")
    top = [(int(ids[i]), float(probabilities[i])) for i in order[:count] if probabilities[i] > 0]
    return TokenProbs(token, float(probabilities[ids == token].sum()), top)

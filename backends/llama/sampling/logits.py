"""The top tokens of a slot's logits, and the probabilities of sampled tokens."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ...base import TokenProbs

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

COLUMNS = 4096
CANDIDATES_MAX = 1024
"""The largest count that `top_candidates` serves, as it is fast only for a few of the tokens."""
_LOWEST = float(np.finfo(np.float32).min)
"""Replaces the logarithm of 0, as in llama-server, because JSON has no infinity."""


def top_candidates(logits: Logits, count: int) -> Ids | None:
    """Return tokens, ascending, that include the *count* top ones; None if they are too many.

    The logits are laid out as a table of `COLUMNS` columns. The bound is the *count*-th largest of
    the columns' highest logits. So at least *count* tokens reach the bound, and all that do are in
    the columns whose highest logit reaches it. Only one pass reads all logits, so that with 262k
    tokens this is 30 times faster than `numpy.argpartition`.
    """
    lines = len(logits) // COLUMNS
    if lines < 4 or not 0 < count <= CANDIDATES_MAX:
        return None
    table, rest = logits[: lines * COLUMNS].reshape(lines, COLUMNS), logits[lines * COLUMNS :]
    highest = table.max(axis=0)
    bound = np.partition(highest, COLUMNS - count)[COLUMNS - count]
    columns = np.flatnonzero(highest >= bound)
    line, column = np.nonzero(table[:, columns] >= bound)
    found = np.concatenate(
        (line * COLUMNS + columns[column], np.flatnonzero(rest >= bound) + lines * COLUMNS)
    )
    # NaNs compare as false; with flat logits all tokens are at the bound.
    return found if count <= len(found) <= 4 * CANDIDATES_MAX else None


def probs_before_sampling(
    logits: Logits, token: int, count: int, *, ranked: bool = False
) -> TokenProbs:
    """Return the model's logprobs of *token* and the *count* top tokens, before any sampler, and
    with *ranked* the token's rank, which takes another pass over the logits.
    """
    wanted = max(1, count)
    found = top_candidates(logits, wanted)
    ids = np.arange(len(logits)) if found is None else found
    ids = ids[np.argsort(-logits[ids], kind="stable")[:wanted]]
    high = logits[ids[0]]
    total = float(high) + math.log(float(np.exp(logits - high).sum(dtype=np.float64)))
    top = [(int(i), _bounded(float(logits[i]) - total)) for i in ids[:count]]
    rank = 1 + int(np.count_nonzero(logits > logits[token])) if ranked else 0
    return TokenProbs(token, _bounded(float(logits[token]) - total), top, rank)


def _bounded(logarithm: float) -> float:
    return max(_LOWEST, min(0.0, logarithm))


def probs_after_sampling(
    ids: NDArray[np.int32], probabilities: Logits, token: int, count: int
) -> TokenProbs:
    """Return the probability of *token* and the *count* top ones among a chain's candidates."""
    order = np.argsort(-probabilities, kind="stable")
    top = [(int(ids[i]), float(probabilities[i])) for i in order[:count] if probabilities[i] > 0]
    return TokenProbs(token, float(probabilities[ids == token].sum()), top)

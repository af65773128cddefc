"""Batches of tokens for a step, and moves of tokens within a slot."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .errors import BackendError


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence in a batch.

    `tokens` have the positions `position`, `position + 1`, …; `logits` requests the logits after
    the last one.
    """

    slot: int
    tokens: Sequence[int]
    position: int
    logits: bool


Move = tuple[int, int, int]
"""A run of tokens that moves to lower positions in its slot: from, to, count."""


def shift_moves(length: int, keep: int, discard: int) -> list[Move]:
    """Return the moves that `Model.shift` makes in a slot of *length* tokens.

    :raises BackendError: no tokens are left to move.
    """
    rest = length - keep - discard
    if keep < 0 or discard < 1 or rest < 1:
        raise BackendError(f"cannot shift by {discard} after {keep} of {length} tokens")
    tail = (keep + discard, keep, rest)
    return [(0, 0, keep), tail] if keep else [tail]


def length_moved(length: int, moves: Sequence[Move]) -> int:
    """Return how many of *length* tokens remain after *moves*.

    :raises BackendError: a run is empty, outside the slot, out of order, or leaves a gap.
    """
    end = total = 0
    for begin, to, count in moves:
        if count < 1 or begin < end or begin + count > length or to != total:
            raise BackendError(f"cannot move {count} of {length} tokens from {begin} to {to}")
        end, total = begin + count, total + count
    return total

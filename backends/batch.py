"""Batches of tokens for a step, and moves of a slot's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .errors import BackendError


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence in a batch.

    `tokens` take the positions `position`, `position + 1`, …; `logits` asks for the logits after
    the last of them.
    """

    slot: int
    tokens: Sequence[int]
    position: int
    logits: bool


Move = tuple[int, int, int]
"""A run of a slot's tokens that moves down: from, to, count."""


def shift_moves(length: int, keep: int, discard: int) -> list[Move]:
    """Return the moves of `Model.shift` in a slot of *length* tokens.

    :raises BackendError: the numbers leave nothing to move.
    """
    rest = length - keep - discard
    if keep < 0 or discard < 1 or rest < 1:
        raise BackendError(f"no shift by {discard} after {keep} of {length} tokens")
    tail = (keep + discard, keep, rest)
    return [(0, 0, keep), tail] if keep else [tail]


def length_moved(length: int, moves: Sequence[Move]) -> int:
    """Return how many tokens of *length* are left by *moves*.

    :raises BackendError: a run is empty, not there, behind an earlier one, or leaves a gap.
    """
    end = total = 0
    for begin, to, count in moves:
        if count < 1 or begin < end or begin + count > length or to != total:
            raise BackendError(f"no move of {count} tokens from {begin} to {to}, of {length}")
        end, total = begin + count, total + count
    return total

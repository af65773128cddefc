"""Batches of tokens for a step, and moves of tokens within a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .errors import BackendError
from .media import item_size


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence in a batch.

    `position` is the number of tokens before them in the slot; a backend in which an image takes
    fewer positions than it has entries keeps the difference to itself. The tokens are those of a
    text, or the entries of one whole item (`media`), which is a batch of its own. `logits` is the
    number of the last of them after which the logits are computed: 0 for none, 1 for the last.
    """

    slot: int
    tokens: Sequence[int]
    position: int
    logits: int


def check_chunks(
    chunks: Sequence[Chunk],
    lengths: Mapping[int, int],
    tokens_max: int,
    ctx_size: int,
    vocab: int,
    logits_max: int,
    *,
    media: bool = False,
) -> None:
    """Check a batch of at most *tokens_max* tokens for slots that hold *lengths* tokens.

    A slot holds at most *ctx_size* tokens; tokens are below *vocab*, and at most *logits_max* have
    logits. With *media*, a chunk alone may be an item. llama.cpp aborts the process, or computes
    wrongly, for a batch that is refused here.

    :raises BackendError: a chunk is wrong, or the batch is empty or too large.
    """
    count, logits, last_slot = 0, 0, -1
    for chunk in chunks:
        slot, tokens = chunk.slot, chunk.tokens
        if slot <= last_slot or slot not in lengths:
            raise BackendError(f"slot {slot} after slot {last_slot}, of {sorted(lengths)}")
        if not tokens or chunk.position != lengths[slot]:
            raise BackendError(
                f"{len(tokens)} tokens at position {chunk.position} in slot {slot}, which has"
                f" {lengths[slot]}"
            )
        if media and item_size(tokens, 0) == len(tokens):
            if len(chunks) > 1 or chunk.logits > 1:
                raise BackendError(f"a media item of slot {slot} beside other tokens or logits")
        elif min(tokens) < 0 or max(tokens) >= vocab:
            raise BackendError(f"a token outside 0 … {vocab - 1} for slot {slot}")
        if chunk.position + len(tokens) > ctx_size:
            raise BackendError(f"slot {slot} holds at most {ctx_size} tokens")
        if not 0 <= chunk.logits <= len(tokens):
            raise BackendError(f"logits of {chunk.logits} of {len(tokens)} tokens in slot {slot}")
        count, logits, last_slot = count + len(tokens), logits + chunk.logits, slot
    if not 0 < count <= tokens_max:
        raise BackendError(f"a batch of {count} tokens; 1 … {tokens_max} are possible")
    if logits > logits_max:
        raise BackendError(f"logits of {logits} tokens; at most {logits_max} are possible")


Move = tuple[int, int, int]
"""A run of tokens that moves to lower positions in its slot: from, to, count."""


def shift_moves(length: int, keep: int, discard: int) -> list[Move]:
    """Return the moves of a `LanguageModel.shift` in a slot of *length* tokens.

    :raises BackendError: *keep* or *discard* is out of range, or no tokens would be left to move.
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

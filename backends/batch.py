"""Batches of tokens for a step, and moves of tokens within a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from .errors import BackendError
from .media import begins_item, is_entry

FLOAT_BYTES = 4
PLACE_BYTES = 16
"""The four int32 of an entry's place in a model with M-RoPE."""


class MediaFormat(NamedTuple):
    """The embeddings that a model reads: rows of *width* numbers. *mrope* is whether each has a
    place, too. An item whose entries see each other has at most *size_max* entries.
    """

    width: int
    mrope: bool
    size_max: int

    def bytes_of(self, size: int) -> int:
        """Return the bytes of the embeddings and places of an item with *size* entries."""
        return size * (self.width * FLOAT_BYTES + (PLACE_BYTES if self.mrope else 0))


class MediaInput(msgspec.Struct, frozen=True):
    """The embeddings of an item (see `media`), with which a model computes its entries.

    *embeddings* are rows of float32, one for each of its *size* entries. The item takes *positions*
    in the context. In a model with M-RoPE, *places* are four int32 for each entry: its position
    relative to the item's first one (time, row, column and 0, or four times that in a sound).
    *causal* is whether the entries see only those before them. Otherwise all of them are computed
    in one step.
    """

    embeddings: memoryview
    size: int
    positions: int
    places: memoryview | None = None
    causal: bool = True


class Chunk(msgspec.Struct, frozen=True):
    """Consecutive tokens of one sequence in a batch.

    `position` is the number of tokens before them in the slot; a backend in which an image takes
    fewer positions than it has entries keeps the difference to itself. `logits` is the number of
    the last of them after which the logits are computed: 0 for none, 1 for the last.

    The tokens are those of a text, or entries of one item. These are a batch of their own, with the
    `media` of the item. `offset` is the number of the item's entries before them.
    """

    slot: int
    tokens: Sequence[int]
    position: int
    logits: int
    media: MediaInput | None = None
    offset: int = 0


def check_chunks(
    chunks: Sequence[Chunk],
    lengths: Mapping[int, int],
    tokens_max: int,
    ctx_size: int,
    vocab: int,
    logits_max: int,
    media: MediaFormat | None = None,
) -> None:
    """Check a batch of at most *tokens_max* tokens for slots that hold *lengths* tokens.

    A slot holds at most *ctx_size* tokens; tokens are below *vocab*, and at most *logits_max* have
    logits. A chunk alone may be of an item with embeddings of the format *media*. llama.cpp aborts
    the process, or computes wrongly, for a batch that is refused here.

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
        if chunk.media is not None:
            if len(chunks) > 1:
                raise BackendError(f"a media item of slot {slot} beside other tokens")
            _check_item(chunk, chunk.media, media)
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


def _check_item(chunk: Chunk, media: MediaInput, wanted: MediaFormat | None) -> None:
    """Check a chunk of an item; see `check_chunks`."""
    tokens, begin, end = chunk.tokens, chunk.offset, chunk.offset + len(chunk.tokens)
    if wanted is None or not wanted.width:
        raise BackendError("the model reads no embeddings of images or sounds")
    if begin < 0 or end > media.size or not _are_entries(tokens, first=begin == 0):
        raise BackendError(f"entries {begin} … {end} of a media item of {media.size}")
    if chunk.logits > (end == media.size):
        raise BackendError("logits inside a media item")
    if not media.causal and not begin == 0 < end == media.size <= wanted.size_max:
        raise BackendError(
            f"entries {begin} … {end} of {media.size} that see each other; a step computes all of"
            f" them, and at most {wanted.size_max}"
        )
    places = 0 if media.places is None else media.places.nbytes
    found = media.embeddings.nbytes, places
    expected = (
        media.size * wanted.width * FLOAT_BYTES,
        media.size * PLACE_BYTES if wanted.mrope else 0,
    )
    if found != expected:
        raise BackendError(f"a media item has {found} bytes; the model reads {expected}")
    if not 0 < media.positions <= media.size or not (wanted.mrope or media.positions == media.size):
        raise BackendError(f"a media item of {media.size} takes {media.positions} positions")


def _are_entries(tokens: Sequence[int], *, first: bool) -> bool:
    """Return whether *tokens* are entries of one item: from its *first* one on, or later ones."""
    return begins_item(tokens[0]) == first and all(
        is_entry(token) and not begins_item(token) for token in tokens[first:]
    )


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

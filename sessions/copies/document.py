"""A change of a session in the form in which it passes to a copy at another daemon."""

from __future__ import annotations

import msgspec

from ...backends.errors import InvalidArgument
from ..journal.entries import CopyChange, SessionFacts, TurnPiece, decode_history, encode
from ..moving.exported import PREFIX_BYTES

_decode_change = msgspec.msgpack.Decoder(CopyChange).decode
_decode_facts = msgspec.msgpack.Decoder(SessionFacts).decode
decode_piece = msgspec.msgpack.Decoder(TurnPiece).decode


class ReceivedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change whose values were checked."""

    facts: SessionFacts | None
    past: bytes | None
    piece: bytes | None
    begins_turn: bool


def encode_change(change: CopyChange) -> bytes:
    """Return a change as a document after its size in 4 bytes."""
    body = encode(change)
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def decode_change(document: bytes) -> ReceivedChange:
    """Return the change in a document, without its size.

    :raises InvalidArgument: it cannot be read.
    """
    try:
        change = _decode_change(document)
        facts = None if change.facts is None else _decode_facts(change.facts)
        if change.past is not None:
            decode_history(change.past)
        piece = None if change.piece is None else decode_piece(change.piece)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidArgument(f"the change of a session cannot be read: {exc}") from None
    if change.past is not None and facts is None:
        raise InvalidArgument("the change of a session has a history without its facts")
    begins_turn = piece is not None and piece.begin is not None
    return ReceivedChange(
        facts=facts, past=change.past, piece=change.piece, begins_turn=begins_turn
    )

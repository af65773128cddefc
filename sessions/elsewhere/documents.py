"""Sessions and changes of sessions in the form in which they pass between daemons."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from ...backends.errors import InvalidArgument, TooLarge
from ...scheduler.kv.file_format import KvHead, StateWriter
from ..conversation.session import Session
from ..entries import CopyChange, SessionFacts, TurnPiece, decode_history, encode

PREFIX_BYTES = 4


class ExportedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as one daemon exports it and another one imports it; *past* is a `HistoryEntry`."""

    facts: SessionFacts
    past: bytes
    persist: bool = True
    kv: KvHead | None = None
    """The KV state that follows."""

    @classmethod
    def of_session(cls, session: Session) -> ExportedSession:
        return cls(facts=session.facts, past=session.packed, persist=session.settings.persist)

    def encode(self) -> bytes:
        """Return the document after its size in 4 bytes. The KV state follows it."""
        body = encode(self)
        return len(body).to_bytes(PREFIX_BYTES, "little") + body

    @classmethod
    def decode(cls, document: bytes) -> ExportedSession:
        """Return the session of a document, which comes without its size.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            found = msgspec.msgpack.decode(document, type=cls)
            decode_history(found.past)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidArgument(f"the exported session cannot be read: {exc}") from None
        return found


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


UPLOADS_MAX = 8
"""Uploads at once; beyond that, the one that was continued least recently is dropped."""
UPLOAD_BYTES_MAX = 32 << 20
"""Bytes of a session without its KV state."""


class Upload:
    """An exported session that arrives: first its document, then its KV state."""

    def __init__(self) -> None:
        self.received = 0
        self.document: bytes | None = None
        """The document once it is complete."""
        self.rest = b""
        """Received bytes of the KV state that are not written yet."""
        self.is_accepted = False
        self.writer: StateWriter | None = None
        self.size = 0
        """The bytes of the whole upload, once the document is known."""
        self._data = bytearray()

    def add_part(self, data: bytes) -> None:
        """Add the next bytes.

        :raises TooLarge: the document is too large.
        """
        self.received += len(data)
        if self.document is not None:
            self.rest += data
            return
        self._data += data
        size = int.from_bytes(self._data[:PREFIX_BYTES], "little")
        if size > UPLOAD_BYTES_MAX:
            raise TooLarge(
                f"an exported session of {size} bytes; the limit is {UPLOAD_BYTES_MAX}",
                data={"bytes": size, "bytes_max": UPLOAD_BYTES_MAX},
            )
        end = PREFIX_BYTES + size
        if len(self._data) >= max(end, PREFIX_BYTES):
            self.document, self.rest = bytes(self._data[PREFIX_BYTES:end]), bytes(self._data[end:])
            self.size = end
            self._data.clear()

    def discard(self) -> None:
        """Delete the written part of a KV state."""
        if self.writer is not None:
            self.writer.discard()


class Uploads:
    """Incomplete uploads by their transfer. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        self._uploads: OrderedDict[str, Upload] = OrderedDict()

    def add_part(self, transfer: str, offset: int, data: bytes) -> Upload:
        """Add the next part of a session, and return its upload. A part at 0 begins again.

        :raises InvalidArgument: it is not the next part.
        :raises TooLarge: the session is too large.
        """
        if not offset:
            self.remove(transfer)
            self._uploads[transfer] = Upload()
            if len(self._uploads) > UPLOADS_MAX:
                self._uploads.popitem(last=False)[1].discard()
        upload = self._uploads.get(transfer)
        have = 0 if upload is None else upload.received
        if upload is None or offset != have or not data:
            raise InvalidArgument(
                f"a part of {len(data)} bytes at {offset}, after {have} bytes",
                hint="send the parts in order, from 0 on",
            )
        self._uploads.move_to_end(transfer)
        upload.add_part(data)
        return upload

    def remove(self, transfer: str) -> None:
        upload = self._uploads.pop(transfer, None)
        if upload is not None:
            upload.discard()

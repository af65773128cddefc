"""Sessions and changes of sessions in the form in which they pass between daemons."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Annotated

import anyio
import msgspec
import structlog

from ...backends.errors import InvalidArgument, TooLarge
from ...scheduler.kv.file_format import KvHead, StateWriter
from ..conversation.session import Session
from ..entries import CopyChange, SessionFacts, TurnPiece, decode_history, encode
from ..media_store import ArrivingContent, MediaLease, MediaStore

PREFIX_BYTES = 4
log = structlog.get_logger(logger_name="sessions")


class MediaHead(msgspec.Struct, frozen=True):
    """An image or a sound of an exported session."""

    sha256: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    size: Annotated[int, msgspec.Meta(ge=1)]


class ExportedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as one daemon exports it and another one imports it; *past* is a `HistoryEntry`.
    The bytes of `media`, and then those of `kv`, follow the document.
    """

    facts: SessionFacts
    past: bytes
    persist: bool = True
    kv: KvHead | None = None
    media: tuple[MediaHead, ...] = ()

    @classmethod
    def of_session(
        cls, session: Session, media: tuple[MediaHead, ...] = (), kv: KvHead | None = None
    ) -> ExportedSession:
        return cls(
            facts=session.facts,
            past=session.packed,
            persist=session.settings.persist,
            kv=kv,
            media=media,
        )

    def encode(self) -> bytes:
        """Return the document after its size in 4 bytes."""
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
    media: tuple[bytes, ...] | None = None


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
        facts=facts,
        past=change.past,
        piece=change.piece,
        begins_turn=begins_turn,
        media=change.media,
    )


UPLOADS_MAX = 8
"""Uploads at once; beyond that, the one that was continued least recently is dropped."""
UPLOAD_BYTES_MAX = 32 << 20
"""Bytes of a session without its images, sounds and KV state."""
COPIED_MEDIA_BYTES_MAX = 6 << 20
"""Those of the images and sounds of a copy, which is read in one frame."""


class Upload:
    """An exported session that arrives over the connection *owner*: first its document, then its
    images and sounds, then its KV state.
    """

    def __init__(self, owner: object):
        self.owner = owner
        self.received = 0
        self.document: bytes | None = None
        """The document once it is complete."""
        self.rest = b""
        """Received bytes behind the document that are not written yet."""
        self.exported: ExportedSession | None = None
        """The session in the document, from `begin_contents` until it is accepted."""
        self.user = -1
        self.is_accepted = False
        self.writer: StateWriter | None = None
        self.size = 0
        """The bytes of the whole upload, once the document is known."""
        self.lock = anyio.Lock()
        """Held while a part is written, and while the written parts are deleted."""
        self._data = bytearray()
        self._has_ended = False
        self._lease: MediaLease | None = None
        self._heads = deque[MediaHead]()
        """Images and sounds that have not begun to arrive."""
        self._content: ArrivingContent | None = None

    def check_open(self) -> None:
        """Check that the upload has not ended.

        :raises InvalidArgument: it has.
        """
        if self._has_ended:
            raise InvalidArgument("the transfer has ended", hint="begin it with a part at 0")

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

    def begin_contents(self, exported: ExportedSession, user: int, store: MediaStore) -> None:
        """Expect the images and sounds of a session of *user*.

        :raises TooLarge: a bound of a session's contents would be exceeded.
        :raises QuotaExceeded: that of the user's would be.
        """
        store.check_arrival(user, {head.sha256: head.size for head in exported.media})
        self.exported, self.user, self.document = exported, user, b""
        self.size += sum(head.size for head in exported.media)
        self._heads.extend(exported.media)
        self._lease = MediaLease(store, user)

    async def write_contents(self, store: MediaStore) -> bool:
        """Write the received bytes of images and sounds; return whether all of these are stored.

        :raises InferdError: one cannot be stored.
        """
        assert self._lease is not None
        while self._content is not None or self._heads:
            if self._content is None:
                head = self._heads.popleft()
                self._content = store.begin_content(self._lease, head.sha256, head.size, "image")
            content = self._content
            data, self.rest = self.rest[: content.missing], self.rest[content.missing :]
            await content.write(data)
            if content.missing:
                return False
            try:
                await content.finish()
            except InvalidArgument as error:  # it was damaged on the disk of the other daemon
                log.warning("session.arrived_without_media", cause=error.message)
            content.close()
            self._content = None
        return True

    def note_accepted(self) -> None:
        """Note that a session holds the images and sounds."""
        self.is_accepted, self.exported = True, None
        self._end_contents()

    async def end(self) -> None:
        """Delete the written parts, unless the session has arrived."""
        self._has_ended = True
        with anyio.CancelScope(shield=True):
            async with self.lock:
                self._end_contents()
                if self.writer is not None:
                    self.writer.discard()

    def _end_contents(self) -> None:
        if self._content is not None:
            self._content.close()
            self._content = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None


class Uploads:
    """Incomplete uploads by their transfer, which end with their connections. Owned by the daemon's
    event loop.
    """

    def __init__(self) -> None:
        self._uploads: OrderedDict[str, Upload] = OrderedDict()

    async def add_part(self, transfer: str, offset: int, data: bytes, owner: object) -> Upload:
        """Add the next part of a session, and return its upload. A part at 0 begins again.

        :raises InvalidArgument: it is not the next part.
        :raises TooLarge: the session is too large.
        """
        ended = list[Upload]()
        if not offset:
            before = self._uploads.pop(transfer, None)
            ended += [] if before is None else [before]
            self._uploads[transfer] = Upload(owner)
            if len(self._uploads) > UPLOADS_MAX:
                ended.append(self._uploads.popitem(last=False)[1])
        try:
            upload = self.find(transfer, owner)
            have = 0 if upload is None else upload.received
            if upload is None or offset != have or not data:
                raise InvalidArgument(
                    f"a part of {len(data)} bytes at {offset}, after {have} bytes",
                    hint="send the parts in order, from 0 on",
                )
            self._uploads.move_to_end(transfer)
            upload.add_part(data)
        finally:
            for other in ended:
                await other.end()
        return upload

    def find(self, transfer: str, owner: object) -> Upload | None:
        """Return the upload of a transfer over the connection *owner*."""
        upload = self._uploads.get(transfer)
        return upload if upload is not None and upload.owner is owner else None

    def of_owner(self, owner: object) -> list[str]:
        """Return the transfers over the connection *owner*."""
        return [name for name, upload in self._uploads.items() if upload.owner is owner]

    async def end(self, transfer: str, owner: object) -> None:
        """End an upload over the connection *owner*, if there is one."""
        upload = self.find(transfer, owner)
        if upload is not None:
            await self.remove(transfer, upload)

    async def remove(self, transfer: str, upload: Upload) -> None:
        """End an upload, unless it has ended already."""
        if self._uploads.get(transfer) is upload:
            del self._uploads[transfer]
            await upload.end()

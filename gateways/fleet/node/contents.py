"""Contents of descriptors on the way from an entry to the daemon, as memfds of the relay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ....backends.errors import BackendError, ProtocolError
from ....wire.frames import FRAME_BYTES_MAX, FrameReader
from ..calls.frames import frame_of
from ..link import CONTENTS_BYTES_MAX, CONTENTS_MAX, ContentKind
from .passed_files import PassedFiles

FRAME_GROWTH_BYTES = 1 << 10
"""Bytes that a frame of the entry may have beside the request in it."""
_HEADERS = range(0x91, 0x93)
_KINDS = frozenset(ContentKind)
_items = msgspec.msgpack.Decoder(list[int | bytes])


class Passage(NamedTuple):
    """Bytes for the daemon, and the descriptors that are passed with them."""

    data: bytes
    descriptors: tuple[int, ...] = ()


class ContentReader:
    """The frames of one entry's connection, and the contents for its next request. *files* are
    those that entries on this machine have passed.
    """

    def __init__(self, files: PassedFiles) -> None:
        self._files = files
        self._frames = FrameReader(FRAME_BYTES_MAX + FRAME_GROWTH_BYTES)
        self._open: int | None = None
        """The memfd of the content whose end has not arrived."""
        self._ready: list[int] = []
        self._bytes = 0

    def read(self, data: bytes) -> Iterator[Passage]:
        """Add *data*, the connection's next bytes, and yield what the daemon gets of it.

        :raises InferdError: the frames or the contents exceed a limit; reading cannot continue.
        """
        plain = bytearray()
        for body in self._frames.read_frames(data):
            if not is_content(body):
                plain += frame_of(body)
                continue
            if plain:
                yield Passage(bytes(plain))
                plain.clear()
            request = self._handle(body)
            if request is not None:
                ready, self._ready, self._bytes = tuple(self._ready), [], 0
                yield Passage(frame_of(request), ready)
        if plain:
            yield Passage(bytes(plain))

    def _handle(self, body: bytes) -> bytes | None:
        """Handle a frame of contents; return the request in it."""
        try:
            kind, data = (*_items.decode(body), b"")[:2]
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"a frame of contents cannot be read: {exc}") from None
        if not isinstance(data, bytes):
            raise ProtocolError("a frame of contents without bytes")
        if kind == ContentKind.REQUEST:
            return data
        if kind == ContentKind.PART:
            self._write(data)
        elif kind == ContentKind.PASSED:
            if len(self._ready) >= CONTENTS_MAX:
                raise ProtocolError("the contents of a request exceed their limits")
            self._ready.append(self._files.take_file(data))
        elif kind == ContentKind.END:
            self._write(b"")
            assert self._open is not None, "`_write` has opened it"
            self._ready.append(self._open)
            self._open = None
        else:
            self.close()
        return None

    def _write(self, part: bytes) -> None:
        self._bytes += len(part)
        if self._bytes > CONTENTS_BYTES_MAX or len(self._ready) >= CONTENTS_MAX:
            raise ProtocolError("the contents of a request exceed their limits")
        try:
            if self._open is None:
                self._open = os.memfd_create("inferd-fleet", os.MFD_CLOEXEC)
            while part:
                part = part[os.write(self._open, part) :]
        except OSError as exc:
            raise BackendError(f"the relay cannot keep a tensor: {exc.strerror}") from None

    def close(self) -> None:
        """Drop the contents."""
        self._files.close_files((*self._ready, *(() if self._open is None else (self._open,))))
        self._ready, self._open, self._bytes = [], None, 0


def is_content(body: bytes) -> bool:
    """Return whether a frame is one of contents, which the daemon does not get."""
    return len(body) > 1 and body[0] in _HEADERS and body[1] in _KINDS

"""The encoder process of an echo model: `python -m inferd.backends.echo.media_program`.

It speaks on standard input, a socket, as `backends.media_process` describes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .. import media_process as m
from ..child_process import bind_to_parent
from ..errors import BackendError, InferdError
from ..fd_frames import FrameReader, send_frame
from ..media import MediaKind
from .media import ECHO_PROJECTOR, EncodedMedia, encode_echo_media, read_echo_media
from .options import EchoOptions

_decoder = msgspec.msgpack.Decoder(m.Request)


class EchoProjector:
    """Reads and encodes contents, and breaks or waits as the *options* request."""

    def __init__(self, options: EchoOptions):
        self._options = options

    def read(
        self, content: bytes, kind: MediaKind, tokens_max: int
    ) -> list[m.TextPiece | m.ItemPiece]:
        """Return the pieces of a content."""
        self._abort_on(content, "read")
        return read_echo_media(content, kind, tokens_max, self._options)

    def encode(self, content: bytes, kind: MediaKind, tokens_max: int) -> EncodedMedia:
        """Return the embeddings of a content."""
        if self._options.media_gate:
            Path(self._options.media_gate).read_bytes()  # until a writer has closed the FIFO
        self._abort_on(content, "encode")
        return encode_echo_media(read_echo_media(content, kind, tokens_max, self._options))

    def _abort_on(self, content: bytes, place: str) -> None:
        text = self._options.media_abort_on.encode()
        if text and self._options.media_abort_in == place and text in content:
            os.abort()


def main() -> None:
    """Answer requests until the daemon closes its end."""
    bind_to_parent(os.getppid())
    serve(socket.socket(fileno=0))


def serve(sock: socket.socket) -> None:
    """Answer the requests on *sock* until it is closed."""
    requests = FrameReader(sock)
    projector = EchoProjector(EchoOptions())
    while True:
        body, descriptors = requests.receive()
        if not body:
            return
        request = _decoder.decode(body)
        try:
            content = b"".join(map(_read, descriptors))
            if isinstance(request, m.OpenProjector):
                projector = EchoProjector(msgspec.convert(request.spec.options, EchoOptions))
            _answer(sock, projector, request, content)
        except InferdError as exc:
            _reply(sock, m.Refused(exc.to_wire()))
        except OSError as exc:
            _reply(sock, m.Refused(BackendError(f"a content cannot be read: {exc}").to_wire()))


def _answer(
    sock: socket.socket, projector: EchoProjector, request: m.Request, content: bytes
) -> None:
    match request:
        case m.OpenProjector():
            _reply(sock, m.ProjectorOpened(ECHO_PROJECTOR))
        case m.ReadContent(kind, tokens_max):
            _reply(sock, m.ContentRead(projector.read(content, kind, tokens_max)))
        case m.EncodeContent(kind, tokens_max):
            begun = time.monotonic()
            encoded = projector.encode(content, kind, tokens_max)
            seconds = time.monotonic() - begun
            try:
                answer = m.ContentEncoded(encoded.causal, seconds)
                _reply(sock, answer, encoded.descriptors)
            finally:
                for descriptor in encoded.descriptors:
                    os.close(descriptor)


def _reply(sock: socket.socket, reply: m.Reply, descriptors: Sequence[int] = ()) -> None:
    send_frame(sock, msgspec.msgpack.encode(reply), descriptors)


def _read(descriptor: int) -> bytes:
    """Return the content of a file from its beginning, and close it."""
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()

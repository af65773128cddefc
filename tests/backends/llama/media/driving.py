"""The encoder process as tests use it: blocking, one request at a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec

from inferd.backends import ModelSpec
from inferd.backends import media_process as m
from inferd.backends.fd_frames import FrameReader, close_all, send_frame

PROGRAM = "inferd.backends.llama.media.program"
TIMEOUT_S = 60


class Ended(Exception):
    """The process has ended with this status."""

    def __init__(self, status: int):
        super().__init__(f"the process has ended with status {status}")
        self.status = status


class EncoderProcess:
    """A process of the program; its end is an `Ended`. *changes* are statements that run before it,
    with the program's module as `program`.
    """

    def __init__(self, changes: str = "pass") -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(TIMEOUT_S)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *self._program(changes)], stdin=theirs.fileno()
            )
        self._reader = FrameReader(self._socket)
        self._decode = msgspec.msgpack.Decoder(m.Reply).decode

    @staticmethod
    def _program(changes: str) -> list[str]:
        if changes == "pass":
            return ["-m", PROGRAM]
        return ["-c", f"import {PROGRAM} as program\n{changes}\nprogram.main()"]

    def __enter__(self) -> EncoderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._socket.close()
        self.process.wait(TIMEOUT_S)

    def open(self, model: Path, projector: Path, **bounds: float) -> m.Reply:
        spec = ModelSpec(name="tiny", path=str(model), mmproj=str(projector))
        return self.request(m.OpenProjector(spec, **bounds))[0]  # type: ignore[arg-type]

    def send(self, request: m.Request, *contents: bytes) -> None:
        descriptors = [memory_of(content) for content in contents]
        send_frame(self._socket, msgspec.msgpack.encode(request), descriptors)
        close_all(descriptors)

    def request(self, request: m.Request, *contents: bytes) -> tuple[m.Reply, list[int]]:
        """Return the reply to *request* with *contents*, and its descriptors."""
        try:
            self.send(request, *contents)
            body, descriptors = self._reader.receive()
        except (BrokenPipeError, ConnectionResetError):
            body, descriptors = b"", []
        if not body:
            raise Ended(self.process.wait(TIMEOUT_S))
        return self._decode(body), descriptors


def memory_of(content: bytes) -> int:
    descriptor = os.memfd_create("content")
    os.write(descriptor, content)
    return descriptor


def content_of(descriptor: int) -> bytes:
    """Return all of a descriptor's bytes, and close it."""
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)

"""The program that reads and encodes images and sounds for one model:
`python -m inferd.backends.llama.media.program`.

It answers the requests of `media_process.py` on standard input, a socket. Decoders in C read bytes
that anybody may have sent, so the kernel limits this process: its memory, its CPU time for each
request, its files and privileges. A content may end it, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator

import msgspec
from msgspec.structs import replace

from ... import media_process as m
from ...child_process import bind_to_parent, present_bytes
from ...errors import InferdError, InvalidArgument, OutOfMemory, TooLarge, error_of
from ...fd_frames import FrameReader, close_all, send_frame
from ...library import SYSLOG_PRIORITIES, library_log
from ...memory import return_large_blocks
from ...sandbox import forbid_new_files
from .images import PIXELS_MAX
from .projector import Encoded, MediaLimits, Projector

CONTENT_BYTES_MAX = 256 << 20
READ_CPU_S_MAX = 60.0
ENCODE_CPU_S_MAX = 1800.0
"""On all threads together. The daemon has a limit on the time of a request."""
DECODE_BYTES = 1 << 30
"""Memory to decode and scale an image of `PIXELS_MAX` pixels, three times."""
SAMPLE_BYTES, SAMPLE_COPIES = 4, 3
"""Of a sound while it is decoded."""
THREAD_BYTES = 80 << 20
"""Addresses that a thread takes: a stack, and a heap of its own. Little of it becomes memory."""
LARGE_BLOCK_BYTES = 1 << 20
"""Larger blocks, such as images, are returned to the system when they are freed."""
EMBEDDINGS_BYTES_MAX = 1 << 30
FILES_MAX = 256
OOM_SCORE_ADJ = 600
NICE = 5
"""The encoder gives way to the worker and the daemon, whose delays all streams see: on two cores,
three streams kept 0.56 of their pace while an image was encoded, instead of 0.43.
"""
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38


class MediaService:
    """The projector of this process, and the requests on it. Owned by the main thread."""

    def __init__(self) -> None:
        self._projector: Projector | None = None

    def reply_to(self, request: m.Request, descriptors: list[int]) -> tuple[m.Reply, list[int]]:
        """Do what *request* says; return the answer and the descriptors beside it, which the caller
        closes.
        """
        try:
            match request:
                case m.OpenProjector():
                    return self._open(request), []
                case m.ReadContent():
                    with _cpu_time(READ_CPU_S_MAX):
                        data = _content(descriptors)
                        pieces = self._opened().read(data, request.kind, request.tokens_max)
                    return m.ContentRead(pieces), []
                case m.EncodeContent():
                    return self._encode(request, _content(descriptors))
                case m.UseThreads():
                    raise AssertionError("it is not answered")
        except InferdError as exc:
            return m.Refused(exc.to_wire()), []
        except MemoryError:
            error = OutOfMemory(
                "there is too little memory to read the content", hint="send a smaller one"
            )
            return m.Refused(error.to_wire()), []
        except Exception as exc:  # the only such place of this process
            return m.Refused(error_of(exc, "reading an image or a sound").to_wire()), []

    def use_threads(self, threads: int) -> None:
        """Compute with *threads* threads from the next content on. If that fails, the process
        ends.
        """
        self._opened().use_threads(threads)

    def _opened(self) -> Projector:
        if self._projector is None:
            raise InvalidArgument("no projector is open")
        return self._projector

    def _open(self, request: m.OpenProjector) -> m.ProjectorOpened:
        if self._projector is not None:
            raise InvalidArgument("a projector is open")
        limits = MediaLimits(request.pixels_max, request.seconds_max)
        projector = Projector(request.spec, request.threads, limits)
        buffer_bytes = request.buffer_bytes or projector.measure_buffer()
        facts = replace(projector.facts, buffer_bytes=buffer_bytes)
        self._projector = projector
        gc.freeze()
        pixels = DECODE_BYTES * max(1.0, limits.pixels_max / PIXELS_MAX)
        samples = SAMPLE_COPIES * SAMPLE_BYTES * limits.seconds_max * facts.sample_rate
        _limit_resources(buffer_bytes + int(max(pixels, samples)))
        if not projector.uses_gpu:  # drivers open devices for writing
            forbid_new_files()
        return m.ProjectorOpened(facts)

    def _encode(self, request: m.EncodeContent, data: bytes) -> tuple[m.Reply, list[int]]:
        begin = time.monotonic()
        found: list[Encoded] = []
        try:
            with _cpu_time(ENCODE_CPU_S_MAX):
                found.extend(self._opened().encode(data, request.kind, request.tokens_max))
        except BaseException:
            close_all([item.descriptor for item in found])
            raise
        causal = [item.causal for item in found]
        seconds = time.monotonic() - begin
        return m.ContentEncoded(causal, seconds), [item.descriptor for item in found]


@contextlib.contextmanager
def _cpu_time(seconds: float) -> Iterator[None]:
    """End the process if the block takes more than *seconds* of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _content(descriptors: list[int]) -> bytes:
    """Return the bytes of the content beside a request.

    :raises InvalidArgument: it is not a file with bytes.
    :raises TooLarge: it is too large for this process.
    """
    if len(descriptors) != 1:
        raise InvalidArgument(f"a content is one descriptor, not {len(descriptors)}")
    (descriptor,) = descriptors
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument("the content is not a file", hint="send its bytes")
    if status.st_size > CONTENT_BYTES_MAX:
        raise TooLarge(
            f"the content has {status.st_size} bytes; at most {CONTENT_BYTES_MAX} are possible",
            hint="send a smaller one",
            data={"bytes": status.st_size, "bytes_max": CONTENT_BYTES_MAX},
        )
    parts, position = [], 0
    while position < status.st_size:
        part = os.pread(descriptor, status.st_size - position, position)
        if not part:
            break
        parts.append(part)
        position += len(part)
    return b"".join(parts)


def _limit_resources(content_bytes: int) -> None:
    """Limit this process to its present memory, and that of one content at a time."""
    threads = THREAD_BYTES * (os.cpu_count() or 1)
    limits = {
        resource.RLIMIT_AS: present_bytes() + content_bytes + threads,
        resource.RLIMIT_FSIZE: EMBEDDINGS_BYTES_MAX,
        resource.RLIMIT_NOFILE: FILES_MAX,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        _, hard = resource.getrlimit(name)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))


def _confine() -> None:
    """Let the process end with its parent, give way to others, gain no privileges, and be closed
    to debuggers.
    """
    bind_to_parent(os.getppid(), OOM_SCORE_ADJ)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with contextlib.suppress(PermissionError):  # a sandbox may forbid it
        os.nice(NICE)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # from here on its files in /proc belong to root


def _write_log_line(level: str, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the daemon no longer reads it
        line = " ".join(text.splitlines())
        sys.stderr.write(f"<{SYSLOG_PRIORITIES[level]}>{line}\n")
        sys.stderr.flush()


def main() -> None:
    """Answer requests until the socket is closed."""
    _confine()
    return_large_blocks(LARGE_BLOCK_BYTES)
    library_log.write_line = _write_log_line
    sock = socket.socket(fileno=os.dup(0))
    reader, service = FrameReader(sock), MediaService()
    decode, encode = msgspec.msgpack.Decoder(m.Request).decode, msgspec.msgpack.encode
    while True:
        try:
            body, descriptors = reader.receive()
        except ConnectionError:
            return
        if not body:
            return
        try:
            request = decode(body)
            if isinstance(request, m.UseThreads):
                service.use_threads(request.threads)
                continue
            reply, beside = service.reply_to(request, descriptors)
        finally:
            close_all(descriptors)
        try:
            send_frame(sock, encode(reply), beside)
        except ConnectionError:
            return
        finally:
            close_all(beside)


if __name__ == "__main__":
    main()

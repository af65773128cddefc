"""The process that renders a model's chat template, and the limits of each rendering.

The worker's own threads and memory are out of the template's reach: a rendering that exceeds a
limit ends its process, and another one takes its place. SmolLM2's template takes 0.07 ms for nine
messages, of which 0.04 ms are the exchange between the processes; for 1000 messages 3.3 ms, of
which 0.7 ms. The process has 15 MB of its own; it starts in 80 ms, beside the worker.
"""

from __future__ import annotations

import enum
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

import msgspec

from ...errors import BackendError, Timeout, TooLarge

CHARACTERS_MAX = 1 << 24
MEMORY_BYTES_MAX = 256 << 20
"""Memory of the process beside the interpreter: its values, the output, and all in between."""
CPU_S_MAX = 1
"""CPU time of one rendering."""
WAIT_S_MAX = 5
"""Time of one rendering, on a busy machine or at low priority."""
SLOW_S = 0.05
"""After this time, a rendering goes on at low priority. Its process is then replaced, as only root
may raise a priority."""
SLOW_NICE = 10
_ATTEMPTS = 2
_PREFIX_BYTES = 4


class Limit(enum.StrEnum):
    """A limit of one rendering. The process reports all except that on CPU time, which ends it."""

    CPU_S = "cpu_s"
    MEMORY_BYTES = "memory_bytes"
    CHARACTERS = "characters"


_LIMITS = {
    Limit.CPU_S: (CPU_S_MAX, "s of CPU time"),
    Limit.MEMORY_BYTES: (MEMORY_BYTES_MAX, "bytes of memory"),
    Limit.CHARACTERS: (CHARACTERS_MAX, "characters"),
}


class Reply(msgspec.Struct, omit_defaults=True):
    """The reply of the process: the text, the limit that was exceeded, or the template's error."""

    text: str = ""
    limit: Limit | None = None
    refusal: str = ""


class TemplateRefusal(Exception):
    """The template's own error, in words."""


class _Ended(Exception):
    """The process has ended without a reply."""


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Send a frame: a length of 4 bytes, and *body*."""
    sock.sendall(len(body).to_bytes(_PREFIX_BYTES, "little") + body)


def receive_frame(sock: socket.socket) -> bytes:
    """Return the next frame's body, or nothing if the other side has closed."""
    size = int.from_bytes(_receive(sock, _PREFIX_BYTES), "little")
    return _receive(sock, size)


def _receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = sock.recv_into(view[filled:])
        if not count:
            return b""
        filled += count
    return bytes(data)


class _Sandbox:
    """A process of `sandbox.py`, which compiles *source* as soon as it has started."""

    def __init__(self, source: bytes):
        self._socket, theirs = socket.socketpair()
        self.compiled = False
        """Whether the reply to the source was read."""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "inferd.backends.llama.text.sandbox"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._socket.settimeout(WAIT_S_MAX)
        self.send(source)

    def send(self, request: bytes) -> None:
        """Send a request."""
        send_frame(self._socket, request)

    def waits_longer(self, seconds: float) -> bool:
        """Return whether no reply arrives within *seconds*."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(1000 * seconds)

    def lower_priority(self) -> None:
        """Compute only while little else does."""
        with suppress(PermissionError):  # systemd's unit forbids it
            os.setpriority(os.PRIO_PROCESS, self._process.pid, SLOW_NICE)

    def receive_reply(self) -> Reply:
        """Return the next reply; raise `_Ended` if the process has ended."""
        body = receive_frame(self._socket)
        if body:
            return msgspec.msgpack.decode(body, type=Reply)
        if self.end() == -signal.SIGPROF:
            return Reply(limit=Limit.CPU_S)
        raise _Ended

    def end(self) -> int:
        """End the process; return its exit status, its own if it had ended."""
        self._socket.close()
        self._process.kill()
        return self._process.wait()


class Renderer:
    """Renders the template *source*. One thread at a time may use it."""

    def __init__(self, source: str):
        self._source = source.encode()
        self._sandbox: _Sandbox | None = None
        self._defect: Exception | None = None
        """Why the template does not compile: it never will."""

    def start_process(self) -> None:
        """Start the process now, so that the first request need not wait for it."""
        with suppress(OSError):  # the first request tries again
            self._sandbox = _Sandbox(self._source)

    def close(self) -> None:
        """End the process; the next request starts another one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.end()

    def compile(self) -> None:
        """Compile the template.

        :raises TemplateRefusal: it cannot be compiled.
        :raises InferdError: as `render` describes.
        """
        self._request(None)

    def render(self, values: dict[str, Any]) -> str:
        """Return the text that the template makes of *values*.

        :raises TemplateRefusal: it cannot be compiled, or refuses the values.
        :raises TooLarge: the text, the memory or the CPU time is past its limit.
        :raises Timeout: the machine is too busy.
        :raises BackendError: no process can run.
        """
        return self._request(msgspec.msgpack.encode(values))

    def _request(self, values: bytes | None) -> str:
        """Return the reply to a request; if something killed the process meanwhile, retry once."""
        if self._defect is not None:
            raise self._defect
        cause: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                return self._exchange(values)
            except TimeoutError:
                self._replace()
                raise Timeout(
                    f"the chat template was not rendered within {WAIT_S_MAX} s",
                    hint="the machine is busy: try again later",
                    data={"wait_s_max": WAIT_S_MAX},
                ) from None
            except (_Ended, OSError, msgspec.DecodeError) as exc:
                self.close()
                cause = exc
        raise BackendError(
            f"no process can render chat templates: {cause or 'it was killed'}",
            hint="try again later; if inferd was upgraded meanwhile, restart the daemon",
        )

    def _exchange(self, values: bytes | None) -> str:
        if self._sandbox is None:
            self._sandbox = _Sandbox(self._source)
        sandbox = self._sandbox
        if not sandbox.compiled:
            try:
                _text_of(sandbox.receive_reply())
            except (TemplateRefusal, TooLarge) as exc:
                self._defect = exc
                self.close()
                raise
            sandbox.compiled = True
        if values is None:
            return ""
        sandbox.send(values)
        slow = sandbox.waits_longer(SLOW_S)
        if slow:
            sandbox.lower_priority()
        reply = sandbox.receive_reply()
        if slow or reply.limit is Limit.MEMORY_BYTES:  # it may keep the memory
            self._replace()
        return _text_of(reply)

    def _replace(self) -> None:
        """Start another process before the next request needs it."""
        self.close()
        self.start_process()


def _text_of(reply: Reply) -> str:
    """Return the text of a reply, or raise its error."""
    if reply.limit is not None:
        most, unit = _LIMITS[reply.limit]
        raise TooLarge(
            f"the chat template needs more than {most} {unit}",
            hint="send fewer or shorter messages, or raw text; or give the model another template",
            data={f"{reply.limit}_max": most},
        )
    if reply.refusal:
        raise TemplateRefusal(reply.refusal)
    return reply.text

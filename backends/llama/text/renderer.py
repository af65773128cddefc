"""The renderings of a model's chat template, in a process of its own.

The worker's own threads and memory are out of the template's reach: a rendering that exceeds a
limit ends its process, and another one takes its place. With SmolLM2's template, nine messages take
0.07 ms, including 0.04 ms for the exchange between the processes; 1000 messages take 3.3 ms,
including 0.7 ms. The process has 15 MB of its own, and starts in 80 ms while the worker goes on.
"""

from __future__ import annotations

import enum
from contextlib import suppress
from typing import Any

import msgspec

from ...errors import BackendError, Timeout, TooLarge
from ...sandbox import WAIT_S_MAX, SandboxEnded, SandboxProcess

CHARACTERS_MAX = 1 << 24
MEMORY_BYTES_MAX = 256 << 20
"""Memory of the process besides the interpreter: its values, the output, and all in between."""
CPU_S_MAX = 0.5
"""CPU time of one rendering, which is that of 100 000 short messages."""


class Limit(enum.StrEnum):
    """A limit of one rendering. The process reports all except that on CPU time, which ends it."""

    CPU_S = "cpu_s"
    MEMORY_BYTES = "memory_bytes"
    CHARACTERS = "characters"


LIMITS = {
    Limit.CPU_S: (CPU_S_MAX, "s of CPU time"),
    Limit.MEMORY_BYTES: (MEMORY_BYTES_MAX, "bytes of memory"),
    Limit.CHARACTERS: (CHARACTERS_MAX, "characters"),
}


class RenderReply(msgspec.Struct, omit_defaults=True):
    """The reply of the process: the text, the limit that was exceeded, or the template's error."""

    text: str = ""
    limit: Limit | None = None
    refusal: str = ""


SLOW_S = 0.05
"""After this time, a rendering goes on at low priority. Its process is replaced afterwards, as only
root may raise a priority."""
_ATTEMPTS = 2


class TemplateRefusal(Exception):
    """The template's own error, in words."""


class Renderer:
    """Renders a template, one text at a time; only `close` may be called meanwhile.

    The process starts in a tenth of a second or more, so it may be started before the template is
    known. *source* is empty until then.
    """

    def __init__(self, source: str = ""):
        self.source = source
        """The template."""
        self._sandbox: SandboxProcess | None = None
        self._compiled = False
        """Whether the present process's reply to the template's source was read."""
        self._defect: Exception | None = None
        """The reason why the template does not compile; it holds for all later requests."""

    def start_process(self) -> None:
        """Start the process now, unless it runs, so that the first request need not wait for it."""
        if self._sandbox is None:
            with suppress(OSError):  # the first request tries again
                self._sandbox = self._started()

    def set_source(self, source: str) -> None:
        """Set the template of a renderer that has none."""
        self.source = source
        if self._sandbox is not None:
            with suppress(OSError):  # the first request finds the process ended, and tries again
                self._sandbox.send(source.encode())

    def _started(self) -> SandboxProcess:
        """Return a process that compiles the template as soon as it has started and knows it."""
        sandbox, self._compiled = SandboxProcess("inferd.backends.llama.text.sandbox"), False
        if self.source:
            try:
                sandbox.send(self.source.encode())
            except OSError:
                sandbox.end()
                raise
        return sandbox

    def close(self) -> None:
        """End the process; the next request starts another one."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.end()

    def compile(self) -> None:
        """Compile the template.

        :raises TemplateRefusal: the template cannot be compiled.
        :raises InferdError: as `render` describes.
        """
        self._request(None)

    def render(self, values: dict[str, Any]) -> str:
        """Return the text that the template makes of *values*.

        :raises TemplateRefusal: the template cannot be compiled, or refuses the values.
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
                sandbox = self._compiled_sandbox()
                return self._reply_of(sandbox, values) if values is not None else ""
            except TimeoutError:
                self._replace()
                raise Timeout(
                    f"the chat template was not rendered within {WAIT_S_MAX} s",
                    hint="the machine is busy: try again later",
                    data={"timeout": "template", "wait_s_max": WAIT_S_MAX},
                ) from None
            except (SandboxEnded, OSError, msgspec.DecodeError) as exc:
                self.close()
                cause = exc
        raise BackendError(
            f"no process can render chat templates: {cause}",
            hint="try again later; if inferd was upgraded meanwhile, restart the daemon",
        )

    def _compiled_sandbox(self) -> SandboxProcess:
        """Return the process, once it has compiled the template."""
        sandbox = self._sandbox
        if sandbox is None:
            sandbox = self._sandbox = self._started()
        if not self._compiled:
            try:
                _text_of(_receive_reply(sandbox))
            except (TemplateRefusal, TooLarge) as exc:
                self._defect = exc
                self.close()
                raise
            self._compiled = True
        return sandbox

    def _reply_of(self, sandbox: SandboxProcess, values: bytes) -> str:
        sandbox.send(values)
        slow = sandbox.waits_longer(SLOW_S)
        if slow:
            sandbox.lower_priority()
        reply = _receive_reply(sandbox)
        if slow or reply.limit is Limit.MEMORY_BYTES:  # it may keep the memory
            self._replace()
        return _text_of(reply)

    def _replace(self) -> None:
        """Start another process before the next request needs it."""
        self.close()
        self.start_process()


def _receive_reply(sandbox: SandboxProcess) -> RenderReply:
    try:
        return msgspec.msgpack.decode(sandbox.receive_reply(), type=RenderReply)
    except SandboxEnded as exc:
        if exc.used_up_cpu:
            return RenderReply(limit=Limit.CPU_S)
        raise


def _text_of(reply: RenderReply) -> str:
    """Return the text of a reply, or raise its error."""
    if reply.limit is not None:
        most, unit = LIMITS[reply.limit]
        raise TooLarge(
            f"the chat template needs more than {most} {unit}",
            hint="send fewer or shorter messages, or raw text; or give the model another template",
            data={f"{reply.limit}_max": most},
        )
    if reply.refusal:
        raise TemplateRefusal(reply.refusal)
    return reply.text

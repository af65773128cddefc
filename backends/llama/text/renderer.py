"""The renderings of a model's chat template, in a process of its own.

The worker's own threads and memory are out of the template's reach: a rendering that exceeds a
limit ends its process, and another one takes its place. With SmolLM2's template, nine messages take
0.07 ms, including 0.04 ms for the exchange between the processes; 1000 messages take 3.3 ms,
including 0.7 ms. The process has 15 MB of its own, and starts in 80 ms while the worker goes on.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ...base import StillRendering
from ...errors import BackendError, Timeout, TooLarge
from .exchange import LIMITS, Limit, Reply
from .sandbox_process import WAIT_S_MAX, SandboxEnded, SandboxProcess

SLOW_S = 0.05
"""After this time, a rendering goes on at low priority. Its process is then replaced, as only root
may raise a priority."""
_ATTEMPTS = 2


class TemplateRefusal(Exception):
    """The template's own error, in words."""


class _Unfinished(Exception):
    """No reply has arrived in time. *sent*: the request was sent."""

    def __init__(self, sent: bool):
        super().__init__()
        self.sent = sent


@dataclass(eq=False, slots=True)
class _Rendering:
    """The rendering of packed *values*; its *outcome* is a text or an error."""

    values: bytes
    sent: bool = False
    outcome: str | Exception | None = None


class Renderer:
    """Renders the template *source*. Several threads may use it; one text is rendered at a time."""

    def __init__(self, source: str):
        self._source = source.encode()
        self._sandbox: SandboxProcess | None = None
        self._lock = threading.Lock()
        self._begun: _Rendering | None = None
        """The rendering that was sent to the process and is not awaited yet."""
        self._defect: Exception | None = None
        """The reason why the template does not compile; it holds for all later requests."""

    def start_process(self) -> None:
        """Start the process now, so that the first request need not wait for it."""
        with suppress(OSError):  # the first request tries again
            self._sandbox = SandboxProcess(self._source)

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
        self._request(None, None)

    def render(self, values: dict[str, Any], wait_s: float | None = None) -> str:
        """Return the text that the template makes of *values*.

        :raises StillRendering: it takes longer than *wait_s*, or another text is being rendered.
        :raises TemplateRefusal: it cannot be compiled, or refuses the values.
        :raises TooLarge: the text, the memory or the CPU time is past its limit.
        :raises Timeout: the machine is too busy.
        :raises BackendError: no process can run.
        """
        rendering = _Rendering(msgspec.msgpack.encode(values))
        if wait_s is None:
            return self._finish(rendering)
        if self._lock.acquire(blocking=False):
            try:
                if self._begun is None:
                    return self._request(rendering.values, wait_s)
            except _Unfinished as exc:
                rendering.sent = exc.sent
                self._begun = rendering if exc.sent else None
            finally:
                self._lock.release()
        raise StillRendering(partial(self._finish, rendering))

    def _finish(self, rendering: _Rendering) -> str:
        """Return the text of a rendering. If the process still works on another one, receive the
        text of that first.
        """
        with self._lock:
            if self._begun not in (None, rendering):
                self._receive_text(self._begun)
            if rendering.outcome is None:
                self._receive_text(rendering)
        if isinstance(rendering.outcome, Exception):
            raise rendering.outcome
        assert rendering.outcome is not None
        return rendering.outcome

    def _receive_text(self, rendering: _Rendering) -> None:
        self._begun = None
        try:
            rendering.outcome = self._request(rendering.values, None, sent=rendering.sent)
        except Exception as exc:  # raised where the rendering is finished
            rendering.outcome = exc

    def _request(self, values: bytes | None, wait_s: float | None, *, sent: bool = False) -> str:
        """Return the reply to a request; if something killed the process meanwhile, retry once."""
        if self._defect is not None:
            raise self._defect
        cause: Exception | None = None
        for _ in range(_ATTEMPTS):
            try:
                if not sent:
                    self._send(values, wait_s)
                return self._receive(wait_s) if values is not None else ""
            except TimeoutError:
                self._replace()
                raise Timeout(
                    f"the chat template was not rendered within {WAIT_S_MAX} s",
                    hint="the machine is busy: try again later",
                    data={"wait_s_max": WAIT_S_MAX},
                ) from None
            except (SandboxEnded, OSError, msgspec.DecodeError) as exc:
                self.close()
                cause, sent = exc, False
        raise BackendError(
            f"no process can render chat templates: {cause or 'it was killed'}",
            hint="try again later; if inferd was upgraded meanwhile, restart the daemon",
        )

    def _send(self, values: bytes | None, wait_s: float | None) -> None:
        """Send a request, once the template is compiled."""
        if self._sandbox is None:
            self._sandbox = SandboxProcess(self._source)
        sandbox = self._sandbox
        if not sandbox.compiled:
            if wait_s is not None and sandbox.waits_longer(wait_s):
                raise _Unfinished(sent=False)
            try:
                _text_of(sandbox.receive_reply())
            except (TemplateRefusal, TooLarge) as exc:
                self._defect = exc
                self.close()
                raise
            sandbox.compiled = True
        if values is not None:
            sandbox.send(values)

    def _receive(self, wait_s: float | None) -> str:
        sandbox = self._sandbox
        if sandbox is None:  # closed meanwhile
            raise SandboxEnded
        if wait_s is not None and sandbox.waits_longer(wait_s):
            raise _Unfinished(sent=True)
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
        most, unit = LIMITS[reply.limit]
        raise TooLarge(
            f"the chat template needs more than {most} {unit}",
            hint="send fewer or shorter messages, or raw text; or give the model another template",
            data={f"{reply.limit}_max": most},
        )
    if reply.refusal:
        raise TemplateRefusal(reply.refusal)
    return reply.text

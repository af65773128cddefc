"""The optional component that exports traces, opened and closed with the daemon."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import structlog

from ...backends.library.installation import install_command
from .requests import RequestTracer
from .spans import RequestFacts, spans_of

if TYPE_CHECKING:
    from ..core import Daemon
    from .export import Export

FLUSH_S_MAX = 3.0
"""The time that a shutdown waits for unsent spans."""

log = structlog.get_logger()


class Traces:
    """Exports the traces of *daemon*, if a target is configured. Lives on its event loop."""

    def __init__(self, daemon: Daemon):
        self._daemon, self._components = daemon, daemon.components
        self._loop = asyncio.get_running_loop()
        self._export: Export | None = None

    def open(self) -> None:
        """Trace requests from now on, or report why that fails."""
        target = self._daemon.config.traces
        if target.is_off:
            return
        try:
            from .export import Export

            note = partial(self._components.note, "traces")
            self._export = Export(target, partial(self._call_from_anywhere, note))
        except ImportError as exc:
            remedy = install_command("traces")
            self._components.note("traces", f"{exc.name} is not installed", remedy=remedy)
            return
        except Exception as exc:  # a failing extra must not keep the daemon from starting
            self._components.note("traces", f"{target}: {exc}")
            return
        RequestTracer(self._export_soon).attach(self._daemon)
        log.info("traces.opened", target=str(target))

    def _export_soon(self, request: RequestFacts, parent: str) -> None:
        """Export a request that has ended, after the current answer is sent."""
        export = self._export
        assert export is not None, "requests are traced only with an export"
        self._loop.call_soon(lambda: export.export_spans(spans_of(request), parent))

    def _call_from_anywhere(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    async def close(self) -> None:
        """Send the remaining spans within `FLUSH_S_MAX`."""
        if self._export is None:
            return
        await anyio.lowlevel.checkpoint()  # so that scheduled exports run
        sent = anyio.Event()
        close = partial(self._close, self._export, sent)
        # A daemon thread: a collector that does not answer must not keep the process alive.
        threading.Thread(target=close, name="traces-close", daemon=True).start()
        with anyio.move_on_after(FLUSH_S_MAX) as scope:
            await sent.wait()
        if scope.cancelled_caught:
            log.warning("traces.not_sent", waited_s=FLUSH_S_MAX)

    def _close(self, export: Export, sent: anyio.Event) -> None:
        try:
            export.close()
        finally:
            self._call_from_anywhere(sent.set)

"""The daemon's responses to `GET /metrics` and `GET /health`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

import anyio.to_thread
import msgspec
import structlog

from ...ipc.metrics_listener import CONTENT_TYPE, JSON, HttpListener, Response

if TYPE_CHECKING:
    from ..core import Daemon
    from .exposition import Exposition

log = structlog.get_logger()


class MetricsPages:
    """The state of a daemon as pages."""

    def __init__(self, daemon: Daemon):
        self._daemon = daemon
        self._exposition: Exposition | None = None

    def new_listener(self, note_listener: Callable[[str | None], object]) -> HttpListener:
        """Return the listener at the address in the configuration. *note_listener* gets the cause
        for which it cannot listen, and None once it can.
        """
        paths = {"/metrics": self._metrics, "/health": self._health}
        return HttpListener(self._daemon.config.metrics, paths, note_listener, _log_failure)

    async def exposition(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        if self._exposition is None:
            # In a thread, because the import takes as long as a tenth of the daemon's start.
            module = await anyio.to_thread.run_sync(import_module, f"{__package__}.exposition")
            self._exposition = self._exposition or module.Exposition(self._daemon)
        return await self._exposition.scrape()

    async def _metrics(self) -> Response:
        return 200, CONTENT_TYPE, await self.exposition()

    async def _health(self) -> Response:
        daemon = self._daemon
        failing = [part["component"] for part in daemon.components.describe() if not part["up"]]
        ending = daemon.draining or daemon.stopping.is_set()
        status = "draining" if ending else "degraded" if failing else "ok"
        body = msgspec.json.encode({"status": status, "failing": failing})
        return (503 if ending else 200), JSON, body + b"\n"


def _log_failure(path: str, exc: Exception) -> None:
    log.error("metrics.failed", path=path, exc_info=exc)

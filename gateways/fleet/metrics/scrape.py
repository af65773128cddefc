"""Scrapes of a fleet: the nodes that answer in time, and the child that joins their texts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import anyio
import anyio.abc
import msgspec

from ....backends.errors import BackendError, InferdError
from ....ipc.http.listen_address import Address
from ....ipc.http.listener import CONTENT_TYPE, JSON, HttpListener, Response
from ....ipc.messages import MetricsResult
from .own_samples import MeasuredEntry, own_samples
from .scraped import ScrapedTexts

CHILD_MODULE = "inferd.gateways.fleet.metrics.exposition"
NODE_S_MAX = 2.0
"""Time for a node's answer."""
NODES_S_MAX = 4.0
"""Time for the answers of all nodes."""
CHILD_S_MAX = 5.0
"""Time for joining the texts."""
REQUEST_S_MAX = 10.0
"""Time for one HTTP request: as long as Prometheus waits by default."""
NODES_AT_ONCE = 64
"""Nodes that are queried at a time."""
TEXTS_SIZE_MAX = 8 << 20
"""Characters of the nodes' texts together; texts that come after them are left out. On two
cores the child joins this many in 2 s (measured).
"""
_result = msgspec.msgpack.Decoder(MetricsResult)


class _Scrape:
    """One scrape, shared by all its callers."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.text = b""
        self.error: InferdError | None = None


class FleetMetrics:
    """The metrics of the entry and its nodes. Lives on the entry's event loop; `run` runs the
    scrapes, one at a time.
    """

    def __init__(self, entry: MeasuredEntry):
        self._entry = entry
        self._group: anyio.abc.TaskGroup | None = None
        self._under_way: _Scrape | None = None

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Run the scrapes until cancelled."""
        async with anyio.create_task_group() as self._group:
            task_status.started()
            await anyio.sleep_forever()

    async def text(self) -> bytes:
        """Return all metrics in Prometheus's text format, from the scrape under way if there is
        one.

        :raises BackendError: the child has failed.
        """
        scrape = self._under_way
        if scrape is None:
            assert self._group is not None, "`run` has begun"
            scrape = self._under_way = _Scrape()
            self._group.start_soon(self._run_scrape, scrape)
        await scrape.done.wait()
        if scrape.error is not None:
            raise scrape.error
        return scrape.text

    async def _run_scrape(self, scrape: _Scrape) -> None:
        try:
            texts = await self._texts()
            scraped = ScrapedTexts(
                os.getpid(),
                own_samples(self._entry, time.monotonic()),
                list(self._entry.nodes.links),
                texts,
            )
            scrape.text = await _joined(scraped)
        except InferdError as exc:
            scrape.error = exc
        finally:
            self._under_way = None
            scrape.done.set()

    async def _texts(self) -> dict[str, str]:
        """Return the metrics of the nodes that answer in time."""
        texts: dict[str, str] = {}
        limiter = anyio.CapacityLimiter(NODES_AT_ONCE)
        size = 0

        async def query(node: str) -> None:
            nonlocal size
            async with limiter:
                with anyio.move_on_after(NODE_S_MAX):
                    text = await self._text_of(node)
                    size += len(text)
                    if text and size <= TEXTS_SIZE_MAX:
                        texts[node] = text

        with anyio.move_on_after(NODES_S_MAX):
            async with anyio.create_task_group() as group:
                for node in self._entry.nodes.loads():
                    group.start_soon(query, node)
        # In the order of the configuration, not of the answers.
        return {node: texts[node] for node in self._entry.nodes.links if node in texts}

    async def _text_of(self, node: str) -> str:
        """Return the metrics of a node; an empty text if it cannot give them."""
        try:
            raw = await self._entry.operator.upstream(node).call("metrics", {})
            return _result.decode(raw).text
        except (InferdError, msgspec.DecodeError):
            return ""


async def _joined(scraped: ScrapedTexts) -> bytes:
    """Return the text that the child writes.

    :raises BackendError: the child has failed.
    """
    command = [sys.executable, "-P", "-m", CHILD_MODULE]
    message = msgspec.msgpack.encode(scraped)
    try:
        with anyio.fail_after(CHILD_S_MAX):
            done = await anyio.run_process(command, input=message, stderr=subprocess.DEVNULL)
    except TimeoutError:
        cause = f"it has not ended within {CHILD_S_MAX:g} s"
    except (OSError, subprocess.CalledProcessError, anyio.BrokenResourceError) as exc:
        cause = str(exc)
    else:
        return done.stdout
    raise BackendError(f"the child process that writes the metrics has failed: {cause}")


class MetricsListener:
    """The HTTP listener of an entry's metrics. *note* prints what an operator should know."""

    def __init__(
        self,
        entry: MeasuredEntry,
        metrics: FleetMetrics,
        address: Address,
        note: Callable[[str], object],
    ):
        self._entry, self._metrics, self._note = entry, metrics, note
        self._failure: str | None = None
        """The failure to listen that was printed last."""
        self._listener = HttpListener(
            address,
            {"/metrics": self._respond_metrics, "/health": self._respond_health},
            self._note_listening,
            lambda path, exc: note(f"GET {path} has failed: {exc}"),
            REQUEST_S_MAX,
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        self._listener.open()
        await self._listener.run()

    def _note_listening(self, failure: str | None) -> None:
        if failure is None:
            self._note(f"the metrics of the fleet are at {self._listener.where}")
        elif failure != self._failure:
            self._note(f"the metrics are not served: {failure}; the entry tries again")
        self._failure = failure

    async def _respond_metrics(self) -> Response:
        return 200, CONTENT_TYPE, await self._metrics.text()

    async def _respond_health(self) -> Response:
        failing, is_stopping = self._entry.nodes.unreachable(), self._entry.is_stopping
        status = "draining" if is_stopping else "degraded" if failing else "ok"
        body = msgspec.json.encode({"status": status, "failing": failing})
        serves = not is_stopping and len(failing) < len(self._entry.nodes.links)
        return (200 if serves else 503), JSON, body + b"\n"

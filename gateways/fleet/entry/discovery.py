"""Discovery of nodes in a Ray cluster: the child process that reads them, and the last table.

The entry goes on with the last table while the child or Ray does not answer.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Protocol

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from ....backends.errors import InferdError
from ..addresses import NodeAddress
from ..published import (
    POLL_S,
    REPORT_BYTES_MAX,
    KnownNodes,
    PublishedFile,
    Report,
    addresses_of,
    merge_published,
)

CHILD_MODULE = "inferd.gateways.fleet.ray_cluster.watch"
FIRST_S_MAX = 30.0
"""Time for the first report of a child: Ray's start on a slow machine."""
SILENT_S_MAX = 5 * POLL_S
"""Time without a report after which a child is replaced."""
RETRY_S_MIN, RETRY_S_MAX = 1.0, 30.0
_report = msgspec.json.Decoder(Report)


class ChildFailed(Exception):
    """A child process of discovery does not report."""


class NodesOwner(Protocol):
    """The nodes of the entry."""

    def publish(self, addresses: Mapping[str, NodeAddress | None]) -> None:
        """Take the nodes that Ray has now, beside those of the configuration."""

    async def wait_settled(self) -> None:
        """Wait until every node was found or not."""


class Discovery:
    """Keeps the published nodes of the cluster at *address*. Owned by the entry's event loop.

    *folder* has the last table; *note* prints what an operator should know.
    """

    def __init__(
        self, address: str, folder: Path, nodes: NodesOwner, note: Callable[[str], object]
    ):
        self._address, self._nodes, self._note = address, nodes, note
        self._file = PublishedFile(folder)
        self._known: KnownNodes = {}
        self._settled = anyio.Event()
        """Set once Ray has answered or has failed to; at once where there is a last table."""
        self._is_lost = False
        """Whether Ray does not answer."""

    def open(self) -> None:
        """Take the last table of the previous start.

        :raises InvalidArgument: it cannot be read.
        """
        self._known = self._file.read()
        self._nodes.publish(addresses_of(self._known))
        if self._known:
            self._settled.set()

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Follow Ray until cancelled; started once nodes are known, or Ray has failed to answer."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow)
            await self._settled.wait()
            await self._nodes.wait_settled()
            task_status.started()

    async def _follow(self) -> None:
        retry_s = RETRY_S_MIN
        while True:
            try:
                async with aclosing(reports_of_child(self._address)) as reports:
                    async for report in reports:
                        self._accept(report)
                        retry_s = RETRY_S_MIN
            except InferdError as exc:
                self._fail(exc.message)
            except (ChildFailed, OSError, msgspec.DecodeError) as exc:
                self._fail(str(exc))
            await anyio.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_S_MAX)

    def _accept(self, report: Report) -> None:
        if report.published is None:
            raise ChildFailed(report.error)
        table = merge_published(self._known, report.published)
        self._nodes.publish(addresses_of(table))
        if table != self._known:
            self._file.write(table)
            self._known = table
        if self._is_lost:
            self._note(f"Ray answers at {self._address} again")
        self._is_lost = False
        self._settled.set()

    def _fail(self, cause: str) -> None:
        if not self._is_lost:
            known = len(self._known)
            self._note(
                f"Ray does not answer at {self._address}: {cause}; the fleet goes on with the"
                f" {known} nodes that it has published"
            )
        self._is_lost = True
        self._settled.set()


async def reports_of_child(address: str) -> AsyncGenerator[Report]:
    """Start a child for the cluster at *address*, and yield its reports until it ends.

    :raises ChildFailed: it has ended or is silent.
    """
    process = await anyio.open_process(
        [sys.executable, "-P", "-m", CHILD_MODULE, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        lines = BufferedByteReceiveStream(process.stdout)
        wait_s = FIRST_S_MAX
        while True:
            try:
                with anyio.fail_after(wait_s):
                    line = await lines.receive_until(b"\n", REPORT_BYTES_MAX)
            except TimeoutError:
                raise ChildFailed(f"no report within {wait_s:g} s") from None
            except (anyio.IncompleteRead, anyio.EndOfStream):
                raise ChildFailed("its child process has ended") from None
            except anyio.DelimiterNotFound:
                raise ChildFailed("its report is too long") from None
            yield _report.decode(line)
            wait_s = SILENT_S_MAX
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.kill()
            await process.aclose()

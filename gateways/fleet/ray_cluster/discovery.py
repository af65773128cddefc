"""Discovery of nodes in a Ray cluster: the child process that reads them, and the last table.

The entry goes on with the last table while the child or Ray does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import anyio.abc

from ..config import EntryConfig
from ..nodes.nodes import Nodes
from .keys import ray_environment
from .published import (
    POLL_S,
    ChildFailed,
    KnownNodes,
    PublishedFile,
    Report,
    ReportingChild,
    addresses_of,
    merge_published,
)

CHILD_MODULE = "inferd.gateways.fleet.ray_cluster.watch"
FIRST_S_MAX = 30.0
"""Time for the first report of a child, which includes Ray's start on a slow machine."""
SILENT_S_MAX = 5 * POLL_S
"""Time without a report after which a child is replaced."""
RETRY_S_MAX = 30.0


class Discovery:
    """Keeps the published nodes of the cluster at *address*. Owned by the entry's event loop.

    *folder* has the last table; *note* prints what an operator should know. Ray's programs have
    the variables *environment*.
    """

    def __init__(
        self,
        address: str,
        folder: Path,
        nodes: Nodes,
        note: Callable[[str], object],
        environment: Mapping[str, str] | None = None,
    ):
        self._address, self._nodes, self._note = address, nodes, note
        self._child = ReportingChild(
            CHILD_MODULE,
            address,
            Report,
            first_s_max=FIRST_S_MAX,
            silent_s_max=SILENT_S_MAX,
            retry_s_max=RETRY_S_MAX,
            environment=environment,
        )
        self._file = PublishedFile(folder)
        self._known: KnownNodes = {}
        self._settled = anyio.Event()
        """Set once Ray has answered or has failed to; at once if there is a last table."""
        self._is_lost = False
        """Whether Ray does not answer."""
        self.answers = False
        """Whether Ray has answered, and does so still."""

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
            group.start_soon(self._child.follow, self._accept, self._fail)
            await self._settled.wait()
            await self._nodes.wait_settled()
            task_status.started()

    async def _accept(self, report: Report) -> bool:
        if report.published is None:
            raise ChildFailed(report.error)
        table = merge_published(self._known, report.published)
        self._nodes.publish(addresses_of(table))
        if table != self._known:
            self._file.write(table)
            self._known = table
        if self._is_lost:
            self._note(f"Ray answers at {self._address} again")
        self._is_lost, self.answers = False, True
        self._settled.set()
        return True

    def _fail(self, cause: str) -> None:
        if not self._is_lost:
            known = len(self._known)
            self._note(
                f"Ray does not answer at {self._address}: {cause}; the fleet goes on with the"
                f" {known} nodes that it has published"
            )
        self._is_lost, self.answers = True, False
        self._settled.set()


def discovery_of(
    config: EntryConfig, nodes: Nodes, note: Callable[[str], object]
) -> Discovery | None:
    """Return the discovery of nodes, if the configuration names a Ray cluster.

    :raises InvalidArgument: a file of Ray in the folder of certificates cannot be used.
    """
    address = config.settings.ray
    if not address:
        return None
    environment = ray_environment(config.certificates, config.settings.certificate)
    return Discovery(address, config.state_dir, nodes, note, environment)

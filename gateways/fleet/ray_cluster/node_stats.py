"""The statistics of a replica that runs beside a node's daemon, for a `FleetRouter`."""

from __future__ import annotations

import time
from typing import Any

import anyio
import msgspec

from ....backends.errors import InferdError
from ....ipc.client import AsyncClient
from ..relay.load import LoadQuery
from .ranking import AT, LOAD, NODE

SOFTWARE = "inferd replica"
STATS_S_MAX = 10.0
"""Time for a connection to the daemon, and its answers."""


class NodeStats:
    """A base of deployments. Each replica publishes the name *node*, and the load of the daemon at
    *socket*; it runs as the daemon's user, or as one who may see all turns.
    """

    def __init__(self, node: str, socket: str):
        self._stats_node, self._stats_socket = node, socket
        self._load_query = LoadQuery()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Publish the name of the node."""
        return {NODE: self._stats_node}

    async def record_routing_stats(self) -> dict[str, Any]:
        """Publish the load, or that the daemon does not answer. Serve calls this once in each
        `request_routing_stats_period_s`.
        """
        stats: dict[str, Any] = {AT: time.monotonic()}  # it goes on when the replica restarts
        try:
            with anyio.fail_after(STATS_S_MAX):
                async with AsyncClient(self._stats_socket, software=SOFTWARE) as client:
                    stats[LOAD] = msgspec.to_builtins(await self._load_query.run(client))
        except (InferdError, TimeoutError, OSError):
            pass  # calls go to other nodes meanwhile
        return stats

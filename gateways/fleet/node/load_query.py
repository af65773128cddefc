"""The queries of a daemon from which the load of its node follows."""

from __future__ import annotations

import time
from typing import Any

import anyio

from ....backends.errors import ConnectionLost
from ....ipc.client import AsyncClient
from ..routing.loads import NodeLoad
from .load import TokenTimeLearner, node_load

CALL_S_MAX = 5.0
"""Time that the daemon has to answer before it counts as not reachable."""


class LoadQuery:
    """Queries a daemon repeatedly, and learns its engines' times for a token from that."""

    def __init__(self) -> None:
        self._times = TokenTimeLearner()

    async def run(self, client: AsyncClient) -> NodeLoad:
        """Return the load.

        :raises InferdError: the daemon was lost, or does not answer.
        """
        with anyio.move_on_after(CALL_S_MAX):
            tasks = await client.queue(all_users=True)
            stats = await client.stats()
            # After `stats`, so that memory which a model has just left is not yet free in the load.
            models: list[Any] = await client.models()
            now = time.monotonic()
            for name, counters in stats["models"].items():
                has_work = bool(counters["running"])
                self._times.observe(name, now, counters["batch_tokens"], has_work=has_work)
            return node_load(client.server.instance, stats, models, tasks, self._times)
        raise ConnectionLost(f"the daemon has not answered within {CALL_S_MAX:g} s")

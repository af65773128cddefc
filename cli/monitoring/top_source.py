"""Samples of the daemon's state for `top`: four calls, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import anyio

from ...ipc.client import AsyncClient
from ..client import SOFTWARE
from ..nodes import on_nodes, stats_on
from .top_view import Sample, TopFrame, frame_of

CALL_S_MAX = 10.0
"""Timeout of a call; the daemon itself waits up to one second for a worker."""


def client_for(path: Path) -> AsyncClient:
    """Return a client of the daemon at *path* that is not connected yet."""
    return AsyncClient(path, timeout=CALL_S_MAX, software=SOFTWARE)


async def take_sample(client: AsyncClient, node: str | None, *, all_users: bool) -> Sample:
    """Return the daemon's state, or that of a node of a fleet.

    :raises NotFound: the fleet does not have the node.
    """
    stats = stats_on(await client.stats(), node)
    at = time.monotonic()
    return Sample(
        at=at,
        software=client.server.software,
        stats=stats,
        models=on_nodes(await client.models(), node),
        tasks=on_nodes(await client.queue(all_users=all_users), node),
        sessions=on_nodes(await client.sessions(all_users=all_users), node),
        node=node,
    )


async def first_frame(
    path: Path, interval_s: float, node: str | None, *, all_users: bool
) -> TopFrame:
    """Return one frame with the rates over *interval_s*.

    :raises NotFound: the fleet does not have the node.
    """
    async with client_for(path) as client:
        before = await take_sample(client, node, all_users=all_users)
        await anyio.sleep(interval_s)
        return frame_of(before, await take_sample(client, node, all_users=all_users))

"""Samples of the daemon's state: four calls, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import anyio

from .....ipc.client import AsyncClient
from ...client import SOFTWARE
from .view import Frame, Sample, frame_of

CALL_S_MAX = 10.0
"""Timeout of a call; the daemon itself waits up to one second for a worker."""


def client_for(path: Path) -> AsyncClient:
    """Return a client of the daemon at *path* that is not connected yet."""
    return AsyncClient(path, timeout=CALL_S_MAX, software=SOFTWARE)


async def take_sample(client: AsyncClient, *, all_users: bool) -> Sample:
    """Return the daemon's state."""
    stats = await client.stats()
    at = time.monotonic()
    return Sample(
        at=at,
        software=client.server.software,
        stats=stats,
        models=await client.models(),
        tasks=await client.queue(all_users=all_users),
        sessions=await client.sessions(all_users=all_users),
    )


async def first_frame(path: Path, interval_s: float, *, all_users: bool) -> Frame:
    """Return one frame with the rates over *interval_s*."""
    async with client_for(path) as client:
        before = await take_sample(client, all_users=all_users)
        await anyio.sleep(interval_s)
        return frame_of(before, await take_sample(client, all_users=all_users))

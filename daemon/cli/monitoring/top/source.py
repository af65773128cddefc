"""Where `top` has its samples from: four calls that look in, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import anyio

from .....ipc.client import AsyncClient
from ...client import SOFTWARE
from .view import Frame, Sample, frame_of

CALL_S_MAX = 10.0
"""What a call that looks in may take: the daemon itself waits a second for a worker."""


def client_for(path: Path) -> AsyncClient:
    """Return a client of the daemon at *path*, not yet connected."""
    return AsyncClient(path, timeout=CALL_S_MAX, software=SOFTWARE)


async def take(client: AsyncClient, *, everybody: bool) -> Sample:
    """Ask the daemon how it is."""
    stats = await client.stats()
    at = time.monotonic()
    return Sample(
        at=at,
        software=client.server.software,
        stats=stats,
        models=await client.models(),
        tasks=await client.queue(all_users=everybody),
        sessions=await client.sessions(all_users=everybody),
    )


async def first_frame(path: Path, interval_s: float, *, everybody: bool) -> Frame:
    """Return one frame, with the rates of *interval_s*."""
    async with client_for(path) as client:
        before = await take(client, everybody=everybody)
        await anyio.sleep(interval_s)
        return frame_of(before, await take(client, everybody=everybody))

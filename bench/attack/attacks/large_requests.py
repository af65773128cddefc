"""Attacks with large requests, hundreds in flight at once."""

from __future__ import annotations

import asyncio
import time

import anyio

from bench.attack.attack import COMPUTING, LOWER, Attack, Target
from inferd import AsyncClient, InferdError

CONNECTIONS, REQUESTS = 2, 220
TEXTS = [
    ("The keeper of the lighthouse wrote 12 letters, and the sea took them. " * 60)[:4000]
] * 250
"""They fill a frame of 1 MB."""
RETRY_PAUSE_S = 0.5


def embed_large(target: Target) -> None:
    """Request the embeddings of 1 MB of texts, again and again, 440 times at once."""

    async def repeat(client: AsyncClient) -> None:
        while True:
            try:
                await client.embed(target.model, TEXTS, priority=target.priority)
            except InferdError:
                await anyio.sleep(RETRY_PAUSE_S)

    async def connect() -> None:
        while True:
            try:
                async with AsyncClient(target.socket) as client, anyio.create_task_group() as group:
                    for _ in range(REQUESTS):
                        group.start_soon(repeat, client)
            except InferdError:
                await anyio.sleep(RETRY_PAUSE_S)

    async def run() -> None:
        with anyio.move_on_after(target.ends_at_s - time.monotonic()):
            async with anyio.create_task_group() as group:
                for _ in range(CONNECTIONS):
                    group.start_soon(connect)

    asyncio.run(run())


ATTACKS = (
    Attack("large-requests", "440 embed requests of 1 MB each at once", embed_large,
           ("share", "gap", "calls", "memory"), COMPUTING, LOWER),
)  # fmt: skip

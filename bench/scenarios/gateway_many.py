"""Scenario of many streams at the same time, over HTTP and over inferd's own protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import psutil

from bench import daemon, gateway
from bench import streams as s
from bench.clients import Client, Request, send_together
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd import AsyncClient

from .base import GATEWAY, INFERD, Scenario, Started, Work

MODELS = ("one", "other")
SLOTS = 250
STEP_MS = 100
TOKENS = 120
STREAMS = len(MODELS) * SLOTS
CONNECTIONS = 4
"""Connections of the side without a gateway. One takes 256 requests, and a user may have 256."""
LATE_MS_MAX = 50
KB_PER_STREAM_MAX = 30.0
SAMPLE_S = 0.2
BOUNDS = dict.fromkeys(
    ("sessions-max", "sessions-user-max", "tasks-waiting-max", "tasks-waiting-user-max"),
    2 * STREAMS,
)


def requests(work: Work) -> list[Request]:
    """Return a request for each stream; the echo model repeats its text."""
    count = 20 if work.small else STREAMS
    text = "abcdefgh " * (TOKENS // 9 + 1)
    return [Request(f"{work.mark} {n} {text}", TOKENS, str(n)) for n in range(count)]


async def send_all(clients: Sequence[Client], work: Work, process: psutil.Process) -> list[Stream]:
    """Send all requests at once. Each stream gets its part of the memory that *process* takes."""
    await clients[0].send_request(Request("warm", 4))
    rest = process.memory_info().rss
    most = rest

    async def sample() -> None:
        nonlocal most
        while True:
            await asyncio.sleep(SAMPLE_S)
            most = max(most, process.memory_info().rss)

    sampling = asyncio.ensure_future(sample())
    try:
        streams = await send_together(clients, requests(work))
    finally:
        sampling.cancel()
    return [replace(each, rss_bytes=(most - rest) / len(streams)) for each in streams]


async def start_daemon(stack: AsyncExitStack) -> daemon.Inferd:
    """Start a daemon, a new one for each run, as a run would reuse memory of the previous one."""
    text = daemon.echo_configuration(MODELS, SLOTS, STEP_MS, BOUNDS)
    server = await stack.enter_async_context(daemon.running(text))
    for model in MODELS:
        await server.keep_loaded(stack, model)
    return server


async def stream_by_socket(work: Work) -> list[Stream]:
    """Stream over a few connections to a daemon, whose memory is measured."""
    async with AsyncExitStack() as stack:
        server = await start_daemon(stack)
        connections = [
            await stack.enter_async_context(AsyncClient(server.socket)) for _ in range(CONNECTIONS)
        ]
        clients: list[Client] = [
            await stack.enter_async_context(
                daemon.StreamClient(connections[n % CONNECTIONS], model=MODELS[n % len(MODELS)])
            )
            for n in range(len(requests(work)))
        ]
        return await send_all(clients, work, server.process)


async def stream_by_http(work: Work) -> list[Stream]:
    """Stream over a connection each to a gateway, whose memory is measured."""
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(gateway.running(await start_daemon(stack)))
        clients: list[Client] = [
            await stack.enter_async_context(http.client(model=MODELS[n % len(MODELS)]))
            for n in range(len(requests(work)))
        ]
        return await send_all(clients, work, http.process)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the gaps while all streams run, and the memory of each."""
    s.check_complete(streams)
    begin_s, end_s = max(each.first_s for each in streams), min(each.ended_s for each in streams)
    pairs = (pair for each in streams for pair in each.gaps())
    gaps = [1000 * (b - a) for a, b in pairs if begin_s <= a and b <= end_s]
    assert gaps, "the streams never ran all at the same time"
    return {
        "gap_p99_ms": s.percentile(gaps, 0.99),
        "gap_p50_ms": s.percentile(gaps, 0.50),
        "rss_kb": streams[0].rss_bytes / 1000,
        "all_running_s": max(each.first_s for each in streams) - streams[0].requested_s,
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start nothing: each run has servers of its own."""
    return Started({INFERD: stream_by_socket, GATEWAY: stream_by_http}, {})


SCENARIO = Scenario(
    name="gateway-many",
    title=f"{STREAMS} streams over HTTP",
    about=f"""\
{STREAMS} streams of {TOKENS} tokens on {len(MODELS)} models of inferd's `echo` with {SLOTS} slots
each, whose steps take {STEP_MS} ms and the time for their tokens. **{INFERD}**: sessions on
{CONNECTIONS} connections to the socket. **{GATEWAY}**: {STREAMS} HTTP connections. Gaps count from
the time at which all streams have begun until the first one ends. The memory is the growth of the
daemon (**{INFERD}**) or of the gateway (**{GATEWAY}**) from rest, after a first request, to its
most.""",
    figures=(
        Figure("gap_p99_ms", "gap p99, ms", 1),
        Figure("gap_p50_ms", "gap p50, ms", 1),
        Figure("rss_kb", "RSS of a stream, kB", 1),
        Figure("all_running_s", "all have begun, s", 2),
    ),
    targets=(
        Target("gap_p99_ms", GATEWAY, most=STEP_MS + LATE_MS_MAX),
        Target("gap_p99_ms", GATEWAY, INFERD),
        Target("rss_kb", GATEWAY, most=KB_PER_STREAM_MAX),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

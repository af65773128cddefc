"""Scenario of metrics scrapes while streams decode: their duration and their effect."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from bench import daemon, texts
from bench import streams as s
from bench.clients import Client, Request, send_together
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, Scenario, Started, Work, start_inferd

SCRAPED = "inferd, scraped"
SLOTS = 16
CTX_SIZE = 512
TOKENS, TOKENS_SMALL = 128, 16
EVERY_S = 0.1
"""A hundred and fifty times as often as Prometheus does."""
SCRAPE = "scrape"
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
P99_MS_MAX = 20.0


def requests(work: Work) -> list[Request]:
    """Return one request per stream."""
    rng = work.rng()
    tokens = TOKENS_SMALL if work.small else TOKENS
    names = texts.names(rng, SLOTS)
    return [Request(f"{work.mark} {texts.paragraph(rng, name)}", tokens, name) for name in names]


async def stream_all(server: daemon.Inferd, work: Work) -> list[Stream]:
    """Stream from all slots."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(server.client()) for _ in range(SLOTS)
        ]
        return await send_together(clients, requests(work))


async def stream_scraped(server: daemon.Inferd, work: Work) -> list[Stream]:
    """Stream from all slots and scrape meanwhile. A scrape is recorded as a stream of one piece."""
    running = asyncio.ensure_future(stream_all(server, work))
    scrapes: list[Stream] = []
    while not running.done():
        scrapes.append(await scrape(server))
        await asyncio.wait([running], timeout=EVERY_S)
    return [*await running, *scrapes]


async def scrape(server: daemon.Inferd) -> Stream:
    """Scrape once."""
    requested_s = time.perf_counter()
    reader, writer = await asyncio.open_unix_connection(server.socket.parent / "metrics.sock")
    writer.write(REQUEST)
    text = await reader.read()
    writer.close()
    error = "" if b"inferd_build_info" in text else text[:200].decode()
    return Stream(requested_s, (time.perf_counter(),), 1, 1, SCRAPE, error=error)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the rate and gaps of the streams, and the time of a scrape."""
    s.check_complete(streams)
    turns = [stream for stream in streams if stream.label != SCRAPE]
    s.check_cold(turns)
    gaps = [b - a for stream in turns for a, b in stream.gaps()]
    scrapes = [stream.ttft_s for stream in streams if stream.label == SCRAPE]
    return {
        "tokens_per_s": sum(stream.tokens for stream in turns) / s.makespan_s(turns),
        "gap_p99_ms": 1000 * s.percentile(gaps, 0.99),
        "scrapes": len(scrapes),
        "scrape_p50_ms": 1000 * s.percentile(scrapes, 0.5),
        "scrape_p99_ms": 1000 * s.percentile(scrapes, 0.99),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon."""
    server = await start_inferd(stack, SLOTS, CTX_SIZE)
    return Started(
        {INFERD: partial(stream_all, server), SCRAPED: partial(stream_scraped, server)}, {}
    )


SCENARIO = Scenario(
    name="scrape",
    title="Scrapes beside streams",
    about=f"""\
{SLOTS} programs stream {TOKENS} tokens each, alone (**{INFERD}**) and while the metrics are scraped
every {EVERY_S:g} s, a hundred and fifty times as often as Prometheus does by default
(**{SCRAPED}**). A scrape's time is from connecting to the last byte.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("gap_p99_ms", "gap p99, ms", 1),
        Figure("scrapes", "scrapes", 0),
        Figure("scrape_p50_ms", "scrape p50, ms", 1),
        Figure("scrape_p99_ms", "scrape p99, ms", 1),
    ),
    targets=(
        Target("scrape_p99_ms", SCRAPED, most=P99_MS_MAX),
        Target("tokens_per_s", SCRAPED, INFERD, least=0.97),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

"""Scenario of short prompts and long answers: a server's overhead over a bare loop."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import psutil

from bench import daemon, llama_server, texts
from bench import streams as s
from bench.clients import Client, Request, bare_run, send_together
from bench.machine import THREADS
from bench.resting import idle_cpu_percent, rss_mb
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import LLAMA_SERVER, Scenario, Side, Started, Work

CASES = (1, 4, 16)
SLOTS = 16
CTX_SIZE = 512
TOKENS, TOKENS_SMALL = 128, 16
PUSHED, PULLED, BARE = "inferd stream", "inferd pull", "bare"
WAKING = Work(1, 0, 0, small=True)
"""Work that wakes a server before its idle CPU is measured."""
IDLE_CPU_PERCENT_MAX = 0.5
"""A side that uses more while it is idle would disturb the runs of other sides."""


def requests(work: Work) -> list[Request]:
    """Return distinct prompts of 40 to 60 tokens, one per stream."""
    rng = work.rng()
    tokens = TOKENS_SMALL if work.small else TOKENS
    return [
        Request(f"{work.mark} {texts.paragraph(rng, name)}", tokens, name, speculation="off")
        for name in texts.names(rng, work.case)
    ]


async def drive_llama_server(server: llama_server.LlamaServer, work: Work) -> list[Stream]:
    """Stream from llama-server in neighbouring slots."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(server.client(slot)) for slot in range(work.case)
        ]
        return await send_together(clients, requests(work))


async def drive_inferd(
    server: daemon.Inferd, kind: type[daemon.StreamClient], work: Work
) -> list[Stream]:
    """Stream from inferd by clients of *kind*."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(server.client(kind=kind)) for _ in range(work.case)
        ]
        return await send_together(clients, requests(work))


async def drive_bare(work: Work) -> list[Stream]:
    """Run the bare loop."""
    return await bare_run(requests(work), SLOTS, CTX_SIZE)


async def start(stack: AsyncExitStack) -> Started:
    """Start both servers and measure their CPU and memory at rest."""
    facts: dict[str, str] = {}
    reference = await stack.enter_async_context(
        llama_server.running(SLOTS, CTX_SIZE, llama_server.NO_CACHES)
    )
    sides: dict[str, Side] = {LLAMA_SERVER: partial(drive_llama_server, reference)}
    await sides[LLAMA_SERVER](WAKING)
    await _rest(facts, "llama-server, idle", [reference.process])
    facts["llama-server with the model: RSS, MB"] = f"{rss_mb(reference.process):.0f}"
    server = await stack.enter_async_context(daemon.running(daemon.configuration(SLOTS, CTX_SIZE)))
    facts["inferd, no model loaded: RSS, MB"] = f"{rss_mb(server.process):.0f}"
    await server.keep_loaded(stack)
    sides[PUSHED] = partial(drive_inferd, server, daemon.StreamClient)
    sides[PULLED] = partial(drive_inferd, server, daemon.PullClient)
    await sides[PUSHED](WAKING)
    processes = [server.process, *server.process.children(recursive=True)]
    assert len(processes) > 1, "no worker"
    await _rest(facts, "inferd with one idle worker", processes)
    facts["inferd, daemon with one worker: RSS, MB"] = f"{rss_mb(server.process):.0f}"
    facts["inferd, worker with the model: RSS, MB"] = f"{sum(map(rss_mb, processes[1:])):.0f}"
    return Started({**sides, BARE: drive_bare}, facts)


async def _rest(facts: dict[str, str], what: str, processes: Sequence[psutil.Process]) -> None:
    idle = await idle_cpu_percent(processes)
    assert idle <= IDLE_CPU_PERCENT_MAX, f"{what}: {idle:.1f} % of a core"
    facts[f"{what}: CPU % of a core"] = f"{idle:.1f}"


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the rate over all streams, the median first token, and percentiles over all gaps."""
    s.check_complete(streams)
    s.check_cold(streams)
    gaps = [b - a for stream in streams for a, b in stream.gaps()]
    return {
        "tokens_per_s": sum(stream.tokens for stream in streams) / s.makespan_s(streams),
        "ttft_ms": 1000 * statistics.median(stream.ttft_s for stream in streams),
        "gap_p50_ms": 1000 * s.percentile(gaps, 0.50),
        "gap_p99_ms": 1000 * s.percentile(gaps, 0.99),
    }


def _at_least(side: str, other: str, bounds: dict[int, float]) -> list[Target]:
    return [Target("tokens_per_s", side, other, least=b, case=case) for case, b in bounds.items()]


SCENARIO = Scenario(
    name="decode",
    title="Decoding",
    about=f"""\
Each stream sends a prompt of 40 to 60 tokens and reads {TOKENS} tokens. All streams of a run start
at once. Tokens per second are the generated tokens divided by the time of the whole run, prompts
included. The time to the first token is the median over the streams. A gap is the time between two
pieces of a stream. {SLOTS} slots of {CTX_SIZE} tokens.

- **llama-server** runs without prompt caches here: every prompt is new, so they could only cost
  time. Its clients name neighbouring slots; without that, its batches break up over time.
- **inferd stream** and **inferd pull** (`compute_single`, one call a token) share a daemon. They
  compute without drafts, as the others do.
- **bare** is a loop around llama.cpp that does nothing else, on {THREADS} threads: it has no queue,
  no text and no other process. It computes with flash attention if inferd does.

The overhead of inferd over **bare** with one stream was measured by a clock around each part of a
worker's iteration (medians of 1500 steps of 10 to 13 ms, on a slow day, 2026-11-22):

- 0.04 ms to update counters;
- 0.17 ms for sampling, which the loop does, too;
- 0.09 ms to send the frame with the token;
- 0.1 ms to learn the step's cost, and 0.19 ms to read commands and to plan, while daemon and
  client use the other core for 0.2 ms each.

In a loop without a model the same work takes a tenth: after a step none of its data is in a CPU
cache. The compute threads sleep meanwhile, so that daemon and client have a core. The threads of
OpenMP, with which llama-server is built by llama.cpp's default, spun there for 0.6 ms. In a trace
of the scheduler, daemon and client then used the worker's own core for 0.3 ms a token: 144
tokens/s instead of 150.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("ttft_ms", "first token, ms", 1),
        Figure("gap_p50_ms", "gap p50, ms", 1),
        Figure("gap_p99_ms", "gap p99, ms", 1),
    ),
    targets=(
        *_at_least(PUSHED, LLAMA_SERVER, {1: 1.0, 4: 1.03, 16: 1.05}),
        *_at_least(PUSHED, BARE, {1: 0.92, 4: 0.85, 16: 0.9}),
        *_at_least(PULLED, PUSHED, {1: 0.9, 16: 0.9}),
    ),
    start=start,
    measure=measure,
    cases=CASES,
    case_heading="streams",
    pictures=(LLAMA_SERVER, PUSHED),
    picture_case=16,
)

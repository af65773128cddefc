"""Short prompts, long answers: what a server costs beside a loop that does nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import psutil

from bench import daemon, llama_server, texts
from bench import streams as s
from bench.clients import Ask, Client, ask_together, bare_run
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
"""Wakes a server up before its idling is measured."""
IDLE_CPU_PERCENT_MAX = 0.5
"""A side that uses more while it idles would disturb the others' runs."""


def asks(work: Work) -> list[Ask]:
    """Return distinct prompts of 40 to 60 tokens, one a stream."""
    rng = work.rng()
    tokens = TOKENS_SMALL if work.small else TOKENS
    return [
        Ask(f"{work.mark} {texts.paragraph(rng, name)}", tokens, name)
        for name in texts.names(rng, work.case)
    ]


async def drive_llama_server(server: llama_server.LlamaServer, work: Work) -> list[Stream]:
    """Ask in neighbouring slots."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(server.client(slot)) for slot in range(work.case)
        ]
        return await ask_together(clients, asks(work))


async def drive_inferd(
    ours: daemon.Inferd, kind: type[daemon.StreamClient], work: Work
) -> list[Stream]:
    """Ask by clients of *kind*."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(ours.client(kind=kind)) for _ in range(work.case)
        ]
        return await ask_together(clients, asks(work))


async def drive_bare(work: Work) -> list[Stream]:
    """Run the bare loop."""
    return await bare_run(asks(work), SLOTS, CTX_SIZE)


async def start(stack: AsyncExitStack) -> Started:
    """Start both servers; find out what they cost at rest."""
    facts: dict[str, str] = {}
    rival = await stack.enter_async_context(
        llama_server.running(SLOTS, CTX_SIZE, llama_server.NO_CACHES)
    )
    sides: dict[str, Side] = {LLAMA_SERVER: partial(drive_llama_server, rival)}
    await sides[LLAMA_SERVER](WAKING)
    await _rest(facts, "llama-server, idle", [rival.process])
    facts["llama-server with the model: RSS, MB"] = f"{rss_mb(rival.process):.0f}"
    ours = await stack.enter_async_context(daemon.running(daemon.configuration(SLOTS, CTX_SIZE)))
    facts["inferd, no model loaded: RSS, MB"] = f"{rss_mb(ours.process):.0f}"
    await ours.keep_loaded(stack)
    sides[PUSHED] = partial(drive_inferd, ours, daemon.StreamClient)
    sides[PULLED] = partial(drive_inferd, ours, daemon.PullClient)
    await sides[PUSHED](WAKING)
    processes = [ours.process, *ours.process.children(recursive=True)]
    assert len(processes) > 1, "no worker"
    await _rest(facts, "inferd with one idle worker", processes)
    facts["inferd, daemon with one worker: RSS, MB"] = f"{rss_mb(ours.process):.0f}"
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
Each stream sends a prompt of 40 to 60 tokens and reads {TOKENS} tokens. All streams of a run ask at
once. Tokens per second count the generated tokens over the whole run, prompts included; the first
token's time is the median over the streams, gaps are those between one piece of a stream and the
next. {SLOTS} slots of {CTX_SIZE} tokens.

- **llama-server** has its prompt caches off here (every prompt is new, they could only cost time),
  and its clients name neighbouring slots, without which its batches fall apart in time.
- **inferd stream** and **inferd pull** (`compute_single`, a call a token) share a daemon.
- **bare** is a loop around llama.cpp that does nothing else, on {THREADS} threads: no queue, no
  text, no other process.

What is lost against it with one stream, by a clock around each part of a worker's turn (medians of
1500 steps of 10 to 13 ms, on a slow day, 2026-11-22): 0.04 ms to count, 0.17 to draw, of which the
loop draws, too, 0.09 to send the frame with the token; then, while daemon and client take 0.2 ms
each of the other core, 0.1 to learn what the step has cost and 0.19 to read commands and to plan.
In a loop without a model the same work takes a tenth: after a step nothing of it is in a cache.
The threads that compute sleep meanwhile, so that daemon and client have a core: OpenMP's, which
llama-server is built with as llama.cpp is by default, spun there for 0.6 ms, and in a trace of the
scheduler daemon and client took the worker's own core for 0.3 ms a token, 144 tokens/s instead of
150.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("ttft_ms", "first token, ms", 1),
        Figure("gap_p50_ms", "gap p50, ms", 1),
        Figure("gap_p99_ms", "gap p99, ms", 1),
    ),
    targets=(
        *_at_least(PUSHED, LLAMA_SERVER, dict.fromkeys(CASES, 1.03)),
        *_at_least(PUSHED, BARE, {1: 0.85, 4: 0.85, 16: 0.9}),
        *_at_least(PULLED, PUSHED, {1: 0.9, 16: 0.9}),
    ),
    start=start,
    measure=measure,
    cases=CASES,
    case_heading="streams",
    pictures=(LLAMA_SERVER, PUSHED),
    picture_case=16,
)

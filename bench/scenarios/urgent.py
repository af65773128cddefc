"""Scenario of urgent requests that arrive while a queue of low priority is served."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import streams as s
from bench import texts
from bench.clients import Request, Server, connect, send_at
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import (
    INFERD,
    LLAMA_SERVER,
    Scenario,
    Started,
    Work,
    as_slow_as_inferd,
    start_pair,
)

SLOTS = 4
CTX_SIZE = 512
LOW, LOW_TOKENS = 24, 96
MOMENTS_S = (1.0, 2.3, 3.6, 4.9, 6.2, 7.5, 8.8, 10.1)
URGENT_TOKENS = 16


def low_requests(work: Work, count: int = LOW, tokens: int = LOW_TOKENS) -> list[Request]:
    """Return the queue of requests of low priority."""
    rng = work.rng()
    count, tokens = (6, 24) if work.small else (count, tokens)
    return [
        Request(
            f"{work.mark} {texts.mark(i, 2)} {texts.paragraph(rng)}",
            tokens, f"low {i + 1}", "low",
        )
        for i in range(count)
    ]  # fmt: skip


def urgent_requests(work: Work, count: int) -> list[Request]:
    """Return the urgent requests: short questions."""
    rng = work.rng()
    marks = (f"{work.mark} {texts.mark(50 + i, 2)}" for i in range(count))
    return [
        Request(mark + texts.question(rng), URGENT_TOKENS, f"urgent {i + 1}", "urgent")
        for i, mark in enumerate(marks)
    ]


async def drive(server: Server, work: Work) -> list[Stream]:
    """Queue the requests of low priority; send an urgent one at each of the moments."""
    moments_s = (0.3, 0.8) if work.small else MOMENTS_S
    low, urgent = low_requests(work), urgent_requests(work, len(moments_s))
    async with AsyncExitStack() as stack:
        clients = await connect(stack, server, len(low) + len(urgent))
        moments_s = (*[0.0] * len(low), *moments_s)
        return await send_at(clients, low + urgent, moments_s)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the urgent requests' times to the first token, and the outcome of the low ones."""
    low = [stream for stream in streams if stream.priority == "low"]
    urgent = [stream for stream in streams if stream.priority == "urgent"]
    s.check_complete(urgent)
    s.check_cold(streams)
    ttfts_s = [stream.ttft_s for stream in urgent]
    return {
        "urgent_ttft_worst_s": max(ttfts_s),
        "urgent_ttft_median_s": statistics.median(ttfts_s),
        "low_s": s.makespan_s(low),
        "low_lost": sum(stream.lost for stream in low),
        "parks": sum(stream.parks for stream in low),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start both sides."""
    return await start_pair(stack, drive, SLOTS, CTX_SIZE)


SCENARIO = Scenario(
    name="urgent",
    title="Urgent requests beside a queue",
    about=f"""\
{LOW} requests of low priority for {LOW_TOKENS} tokens each arrive at once, for {SLOTS} slots. From
{MOMENTS_S[0]:g} s on, an urgent request arrives every {MOMENTS_S[1] - MOMENTS_S[0]:.1f} s,
{len(MOMENTS_S)} in all: a question of about 20 tokens with an answer of {URGENT_TOKENS} tokens.
llama-server has no priorities and serves in the order of arrival. {CTX_SIZE} tokens a slot.""",
    figures=(
        Figure("urgent_ttft_worst_s", "urgent: first token, worst, s", 3),
        Figure("urgent_ttft_median_s", "urgent: first token, median, s", 3),
        Figure("low_s", "low: all done, s"),
        Figure("low_lost", "low: lost, worst run", 0, over="max"),
        Figure("parks", "low: parked, times", 0),
    ),
    targets=(
        Target("urgent_ttft_worst_s", INFERD, most=0.25),
        Target("urgent_ttft_worst_s", LLAMA_SERVER, INFERD),
        Target("low_lost", INFERD, most=0),
        Target("low_s", INFERD, LLAMA_SERVER, most=1.1),
        as_slow_as_inferd("urgent_ttft_median_s"),
        as_slow_as_inferd("low_s"),
    ),
    start=start,
    measure=measure,
)

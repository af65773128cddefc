"""Scenario of many sessions that begin at once with the same long text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import streams as s
from bench import texts
from bench.clients import Request, Server, bare_run, connect, send_together
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

SLOTS = 16
CTX_SIZE = 1024
WORDS = 600
TOKENS = 24


BARE = "bare"


def requests_of(work: Work) -> list[Request]:
    """Return each session's request: the shared text, then its own."""
    rng = work.rng()
    count, words = (4, 100) if work.small else (SLOTS, WORDS)
    common = f"{work.mark} {texts.story(rng, words)}"
    return [
        Request(f"{common}{texts.question(rng, name)}", TOKENS, name)
        for name in texts.names(rng, count)
    ]


async def drive(server: Server, work: Work) -> list[Stream]:
    """Send all sessions' requests at once."""
    requests = requests_of(work)
    async with AsyncExitStack() as stack:
        return await send_together(await connect(stack, server, len(requests)), requests)


async def drive_bare(work: Work) -> list[Stream]:
    """Run the bare loop."""
    return await bare_run(requests_of(work), SLOTS, CTX_SIZE, share=True)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the time until all were done, and the times to the first token."""
    s.check_complete(streams)
    return {
        "makespan_s": s.makespan_s(streams),
        "ttft_median_s": s.ttft_median_s(streams),
        "ttft_worst_s": max(stream.ttft_s for stream in streams),
        "prompt_tokens": s.computed_tokens(streams),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start both servers; the bare loop is a process for each run."""
    started = await start_pair(stack, drive, SLOTS, CTX_SIZE)
    return Started({**started.sides, BARE: drive_bare}, started.facts)


SCENARIO = Scenario(
    name="prefix",
    title="A shared prefix",
    about=f"""\
{SLOTS} new sessions start at once: {WORDS} words that all share, then a question of their own of
15 to 20 tokens; each reads {TOKENS} tokens. {SLOTS} slots of {CTX_SIZE} tokens on both sides.
**bare** is a loop around llama.cpp that does nothing else: it computes the shared text in steps of
512 tokens, copies the state, computes all questions in one step, and decodes. It is the limit of
this machine.

llama.cpp's attention limits both: it computes in tiles only from 64 tokens of a sequence on, and a
question has 17; decoding always computes single tokens. In a loop, steps of these shapes took 4.15
s: 1.61 for the shared text, however it is split (128 to 512 tokens a step), 0.92 for the
questions, 1.60 for the answers (2026-11-22, medians of 4, in a calm quarter of an hour; 4.15 to
4.9 s within two hours, as the host's speed varied). inferd adds 0.02 s until its first step
begins, 0.03 to save the shared state and to copy it into 15 slots, and 0.03 between its steps.
While 16 prompts arrive, daemon and clients use one of the two cores.""",
    figures=(
        Figure("makespan_s", "all done, s"),
        Figure("ttft_median_s", "first token, median, s"),
        Figure("ttft_worst_s", "first token, worst, s"),
        Figure("prompt_tokens", "prompt tokens computed", 0),
    ),
    targets=(
        Target("makespan_s", LLAMA_SERVER, INFERD, least=6.5),
        Target("ttft_median_s", LLAMA_SERVER, INFERD, least=6.0),
        as_slow_as_inferd("makespan_s"),
        as_slow_as_inferd("ttft_median_s"),
        Target("makespan_s", LLAMA_SERVER, BARE),
        Target("ttft_median_s", LLAMA_SERVER, BARE),
    ),
    start=start,
    measure=measure,
)

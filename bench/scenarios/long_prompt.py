"""Scenario of a long prompt beside streams: the streams' pauses, and the start of its answer.

`step-ms-target` trades one for the other. The sides are llama-server, inferd with its defaults, and
inferd with each of several settings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench import daemon, gateway, llama_server, texts
from bench import streams as s
from bench.clients import Request, Server, send_at
from bench.machine import MODEL
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import (
    GATEWAY,
    IDLE_S_MAX,
    INFERD,
    LLAMA_SERVER,
    Scenario,
    Started,
    Work,
    as_slow_as_inferd,
    measure_setting,
    measured_text,
    side_of,
    start_inferd,
)

STREAMS, STREAM_TOKENS = 3, 256
CTX_SIZE = 2048
WORDS, TOKENS = 1200, 16
ARRIVES_S = 1.5
STEP_MS_TARGETS = (75, 100, 200, 300)
USES = 3
"""Runs of the same work before the setting is measured."""
LONG = "long prompt"


def requests(work: Work) -> list[Request]:
    """Return the streams' requests and, last, the long one."""
    rng = work.rng()
    tokens, words = (128, 150) if work.small else (STREAM_TOKENS, WORDS)
    short = [
        Request(f"{work.mark} {texts.paragraph(rng, name)}", tokens, name)
        for name in texts.names(rng, STREAMS)
    ]
    return [*short, Request(f"{work.mark} Once: {texts.story(rng, words - 1)}", TOKENS, LONG)]


async def drive(server: Server, work: Work) -> list[Stream]:
    """Start the streams, then send the long prompt."""
    all_requests = requests(work)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(server.client(slot))
            for slot in range(len(all_requests))
        ]
        return await send_at(clients, all_requests, [*[0.0] * STREAMS, ARRIVES_S])


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the streams' worst gap while the long prompt is computed, and its time to the first
    token.
    """
    s.check_complete(streams)
    s.check_cold(streams)
    [long] = [stream for stream in streams if stream.label == LONG]
    others = [stream for stream in streams if stream is not long]
    early = [stream.label for stream in others if stream.ended_s < long.first_s]
    assert not early, f"{early} ended before the long prompt's first token: nothing to measure"
    return {
        "gap_worst_s": s.gap_worst_s(others, long.requested_s, long.first_s),
        "long_ttft_s": long.ttft_s,
        "makespan_s": s.makespan_s(streams),
    }


def name_of_setting(step_ms: int) -> str:
    """Return the name of the side with a setting."""
    return f"{INFERD}, {step_ms} ms"


async def start(stack: AsyncExitStack) -> Started:
    """Start llama-server, a daemon with its defaults, and one for each setting."""
    slots = STREAMS + 1
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inferd-bench-")))

    async def use(server: daemon.Inferd) -> None:
        for number in range(USES):
            await drive(server, Work(0, number, number))

    text = daemon.configuration(slots, CTX_SIZE)
    records = await measure_setting(text, home, MODEL.stem, use)
    reference = await stack.enter_async_context(llama_server.running(slots, CTX_SIZE))
    sides = {LLAMA_SERVER: side_of(drive, reference)}
    inferd = await start_inferd(stack, slots, CTX_SIZE, records=records)
    http = await stack.enter_async_context(gateway.running(inferd))
    sides |= {INFERD: side_of(drive, inferd), GATEWAY: side_of(drive, http)}
    for step_ms in STEP_MS_TARGETS:
        settings = {"step-ms-target": step_ms}
        server = await start_inferd(stack, slots, CTX_SIZE, settings, records)
        sides[name_of_setting(step_ms)] = side_of(drive, server)
    return Started(sides, {"its setting": measured_text(records)})


SCENARIO = Scenario(
    name="long-prompt",
    title="A long prompt beside streams",
    about=f"""\
{STREAMS} streams of {STREAM_TOKENS} tokens run; after {ARRIVES_S:g} s a prompt of {WORDS} words
arrives. The gap is the longest pause of any stream between the long prompt's arrival and its first
token. {STREAMS + 1} slots of {CTX_SIZE} tokens. **inferd** runs with its default of
`step-ms-target`, the other rows with the value in their name. It has done this work {USES} times
before and was idle for up to {IDLE_S_MAX} s, in which it measured its setting for such steps.""",
    figures=(
        Figure("gap_worst_s", "streams: worst gap, s", 3),
        Figure("long_ttft_s", "long prompt: first token, s"),
        Figure("makespan_s", "all done, s"),
    ),
    targets=(
        Target("gap_worst_s", INFERD, most=0.2),
        Target("gap_worst_s", LLAMA_SERVER, INFERD),
        Target("long_ttft_s", INFERD, LLAMA_SERVER, most=1.25),
        as_slow_as_inferd("gap_worst_s"),
        as_slow_as_inferd("long_ttft_s"),
    ),
    start=start,
    measure=measure,
)

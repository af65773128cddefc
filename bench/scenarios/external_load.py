"""Scenario of streams beside another program that keeps a core busy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from bench import daemon, texts
from bench import streams as s
from bench.clients import Request, connect, send_together
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, Scenario, Side, Started, Work, start_inferd

SLOTS = 4
CTX_SIZE = 512
STREAMS = 4
TOKENS = 256
ONE_CORE = "inferd, cores = 1"
BEFORE_S = 0.5


@asynccontextmanager
async def busy_program() -> AsyncIterator[None]:
    """Run a program that computes without end."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await asyncio.sleep(BEFORE_S)
        yield
    finally:
        process.kill()
        await process.wait()


def side_of(server: daemon.Inferd) -> Side:
    """Return the side that streams from *server* beside the busy program."""

    async def side(work: Work) -> list[Stream]:
        rng = work.rng()
        tokens = 16 if work.small else TOKENS
        async with AsyncExitStack() as stack:
            clients = await connect(stack, server, STREAMS)
            await stack.enter_async_context(busy_program())
            requests = [
                Request(f"{work.mark} {n} {texts.question(rng)}", tokens) for n in range(STREAMS)
            ]
            return await send_together(clients, requests)

    return side


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return all streams' tokens per second, including the time until the load is detected."""
    s.check_complete(streams)
    return {"tokens_s": sum(stream.tokens for stream in streams) / s.makespan_s(streams)}


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon that detects external load, and one with one core less from the start."""
    adapting = await start_inferd(stack, SLOTS, CTX_SIZE)
    one_core = await start_inferd(stack, SLOTS, CTX_SIZE, {"cores": 1})
    return Started({INFERD: side_of(adapting), ONE_CORE: side_of(one_core)}, {})


SCENARIO = Scenario(
    name="external-load",
    title="Beside another busy program",
    about=f"""\
{STREAMS} programs stream {TOKENS} tokens each while another program computes continuously on one of
two cores. **{INFERD}** detects that a core is taken. **{ONE_CORE}** is configured for it from the
start, which is the best that a fixed number of threads reaches here. {SLOTS} slots of {CTX_SIZE}
tokens.""",
    figures=(Figure("tokens_s", "tokens/s", 1),),
    targets=(Target("tokens_s", INFERD, ONE_CORE, least=0.9),),
    start=start,
    measure=measure,
    pictures=(INFERD,),
)

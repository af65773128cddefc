"""Scenario of two models busy at the same time, and an urgent question beside a busy model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import daemon, texts
from bench import streams as s
from bench.clients import Client, Request, gather_all, send_together
from bench.machine import MODEL
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd import Priority

from .base import INFERD, Scenario, Side, Started, Work

MODELS = ("one", "other")
ALONE = "inferd, one model"
SLOTS = 16
CTX_SIZE = 512
STREAMS = 4
TOKENS = 128
LOW_TOKENS = 96
URGENT_AT_S = 2.0
URGENT_TOKENS = 8


def requests(work: Work, label: str, count: int, tokens: int) -> list[Request]:
    """Return the requests of *count* programs."""
    rng = work.rng()
    priority: Priority = "low" if label == "low" else "normal"
    return [
        Request(f"{work.mark} {label} {n} {texts.question(rng)}", tokens, label, priority)
        for n in range(count)
    ]


async def connected(
    stack: AsyncExitStack, server: daemon.Inferd, model: str, count: int
) -> list[Client]:
    """Connect *count* programs that use *model*."""
    return [await stack.enter_async_context(server.client(model=model)) for _ in range(count)]


def side_of(server: daemon.Inferd, models: Sequence[str]) -> Side:
    """Return the side that keeps *models* busy.

    Then it keeps the first of them busy while an urgent question goes to the last.
    """

    async def busy(work: Work, model: str) -> list[Stream]:
        async with AsyncExitStack() as stack:
            clients = await connected(stack, server, model, STREAMS)
            tokens = 16 if work.small else TOKENS
            return await send_together(clients, requests(work, model, STREAMS, tokens))

    async def urgent(work: Work) -> list[Stream]:
        async with AsyncExitStack() as stack:
            low = await connected(stack, server, models[0], SLOTS)
            [client] = await connected(stack, server, models[-1], 1)
            request = Request(f"{work.mark} urgent", URGENT_TOKENS, "urgent", "urgent")

            async def later() -> list[Stream]:
                await asyncio.sleep(URGENT_AT_S)
                return [await client.send_request(request)]

            beside = send_together(low, requests(work, "low", SLOTS, LOW_TOKENS))
            found = await gather_all((beside, later()))
            return [stream for streams in found for stream in streams]

    async def side(work: Work) -> list[Stream]:
        found = await gather_all(busy(work, model) for model in models)
        return [stream for streams in found for stream in streams] + await urgent(work)

    return side


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return all models' tokens per second, and the urgent answer's time to the first token."""
    s.check_complete(streams)
    busy = [stream for stream in streams if stream.label in MODELS]
    [urgent] = [stream for stream in streams if stream.label == "urgent"]
    low = [stream for stream in streams if stream.label == "low"]
    assert urgent.first_s < max(stream.ended_s for stream in low), "no low stream was left"
    return {
        "tokens_s": sum(stream.tokens for stream in busy) / s.makespan_s(busy),
        "urgent_ttft_s": urgent.ttft_s,
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with both models loaded."""
    text = daemon.configuration(SLOTS, CTX_SIZE)
    text += "".join(f'\n[models.{name}]\nfile = "{MODEL}"\n' for name in MODELS)
    server = await stack.enter_async_context(daemon.running(text))
    for model in MODELS:
        await server.keep_loaded(stack, model)
    return Started({ALONE: side_of(server, MODELS[:1]), INFERD: side_of(server, MODELS)}, {})


SCENARIO = Scenario(
    name="two-models",
    title="Two models at the same time",
    about=f"""\
{STREAMS} programs stream {TOKENS} tokens each from one model (**{ALONE}**), or {STREAMS} from each
of two (**{INFERD}**); the figure is all tokens divided by the whole time. Then {SLOTS} streams of
low priority run on one model, and after {URGENT_AT_S:g} s an urgent question goes to the other.
{SLOTS} slots of {CTX_SIZE} tokens each.""",
    figures=(
        Figure("tokens_s", "tokens/s", 1),
        Figure("urgent_ttft_s", "urgent: first token, s", 3),
    ),
    targets=(
        Target("tokens_s", INFERD, ALONE, least=1.0),
        Target("urgent_ttft_s", INFERD, most=0.4),
    ),
    start=start,
    measure=measure,
    pictures=(INFERD,),
)

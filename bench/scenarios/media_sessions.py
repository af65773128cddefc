"""Scenario of sixteen sessions that begin at once with a question about the same image."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import media_servers, texts
from bench import streams as s
from bench.clients import MEDIA_MARKER, Request, send_together
from bench.media_servers import CAUSAL, Connect
from bench.pictures import png
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, LLAMA_SERVER, Scenario, Side, Started, Work

SESSIONS = 16
CTX_SIZE = 1536
TOKENS = 8


def requests_of(work: Work) -> list[Request]:
    """Return each session's request: the image, then its own question."""
    rng = work.rng()
    image = png(random.Random(f"{work.serial} shared"))
    count = 4 if work.small else SESSIONS
    return [
        Request(f"{work.mark} {MEDIA_MARKER}{texts.question(rng, name)}", TOKENS, name, image=image)
        for name in texts.names(rng, count)
    ]


def side_with(connect: Connect) -> Side:
    """Return the side of a server."""

    async def side(work: Work) -> list[Stream]:
        requests = requests_of(work)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(-1)) for _ in requests]
            return await send_together(clients, requests)

    return side


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the time until all were done, and the times to the first token."""
    s.check_complete(streams)
    return {
        "makespan_s": s.makespan_s(streams),
        "ttft_median_s": s.ttft_median_s(streams),
        "prompt_tokens": s.computed_tokens(streams),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start both servers."""
    projectors = {CAUSAL: media_servers.write_projectors()[CAUSAL]}
    shape = SESSIONS, CTX_SIZE
    reference = await media_servers.start_reference(stack, projectors[CAUSAL], *shape)
    own = await media_servers.start_daemon(stack, projectors, *shape)
    return Started({LLAMA_SERVER: side_with(reference), INFERD: side_with(own[CAUSAL])}, {})


SCENARIO = Scenario(
    name="media-sessions",
    title="Sixteen sessions about one image",
    about=f"""\
{SESSIONS} new sessions ask at once about the same image of 512 × 512 pixels, each with a question
of its own, and read {TOKENS} tokens. inferd encodes the image once and computes it once.
{SESSIONS} slots of {CTX_SIZE} tokens; projector and model are those of the causal case of the
scenario `media`.""",
    figures=(
        Figure("makespan_s", "all done, s"),
        Figure("ttft_median_s", "first token, median, s"),
        Figure("prompt_tokens", "prompt tokens computed", 0),
    ),
    targets=(Target("makespan_s", LLAMA_SERVER, INFERD, least=6.0),),
    start=start,
    measure=measure,
)

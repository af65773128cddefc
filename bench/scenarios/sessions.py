"""Scenario of many more conversations than slots: whether their computed state is kept."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import streams as s
from bench import texts
from bench.clients import Request, Server, connect, gather_all, send_in_turn
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
SESSIONS, TURNS = 100, 3
TOKENS = 24


def conversation(work: Work, number: int, tokens: int) -> list[Request]:
    """Return one program's requests, turn by turn."""
    rng = work.rng()
    rng.seed(rng.randint(0, 1 << 30) + number)
    begin = f"{work.mark} {texts.mark(number, 2)} {texts.paragraph(rng)}"
    rest = [texts.question(rng) for _ in range(TURNS - 1)]
    return [Request(text, tokens, f"session {number + 1}") for text in (begin, *rest)]


async def drive(server: Server, work: Work) -> list[Stream]:
    """Begin all conversations at once; each continues as soon as it has its answer."""
    count, tokens = (6, 8) if work.small else (SESSIONS, TOKENS)
    async with AsyncExitStack() as stack:
        clients = await connect(stack, server, count)
        conversations = (
            send_in_turn(client, conversation(work, number, tokens))
            for number, client in enumerate(clients)
        )
        return [stream for turns in await gather_all(conversations) for stream in turns]


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the time until all were done, and the tokens computed again."""
    s.check_complete(streams)
    turns = s.by_label(streams).values()
    s.check_cold(first for first, *_ in turns)
    return {
        "makespan_s": s.makespan_s(streams),
        "ttft_median_s": s.ttft_median_s(streams),
        "computed_twice": sum(map(s.computed_twice, turns)),
        "prompt_tokens": s.computed_tokens(streams),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start both sides."""
    return await start_pair(stack, drive, SLOTS, CTX_SIZE)


SCENARIO = Scenario(
    name="sessions",
    title="More conversations than slots",
    about=f"""\
{SESSIONS} conversations of {TURNS} turns begin at once over {SLOTS} slots of {CTX_SIZE} tokens: a
paragraph, then questions of about 20 tokens, with answers of {TOKENS} tokens; a program sends its
next question as soon as it has its answer. A token of a history is computed twice if a turn finds
less in the caches than the conversation's previous turn had computed: that turn's input and output
without the last token, which is sampled and not computed. The figure is the sum over all turns,
from the answers' metadata.""",
    figures=(
        Figure("makespan_s", "all done, s"),
        Figure("ttft_median_s", "first token, median, s"),
        Figure("computed_twice", "tokens computed twice, worst run", 0, over="max"),
        Figure("prompt_tokens", "prompt tokens computed", 0),
    ),
    targets=(
        Target("makespan_s", LLAMA_SERVER, INFERD, least=1.0),
        Target("computed_twice", INFERD, most=0),
        as_slow_as_inferd("makespan_s"),
    ),
    start=start,
    measure=measure,
)

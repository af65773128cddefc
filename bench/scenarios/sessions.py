"""Many more conversations than slots: what is known of one is kept while the others have theirs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import streams as s
from bench import texts
from bench.clients import Ask, Server, ask_in_turn, connect, together
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, LLAMA_SERVER, Scenario, Started, Work, start_pair

SLOTS = 4
CTX_SIZE = 512
SESSIONS, TURNS = 100, 3
TOKENS = 24


def conversation(work: Work, number: int, tokens: int) -> list[Ask]:
    """Return what one program asks, turn by turn."""
    rng = work.rng()
    rng.seed(rng.randint(0, 1 << 30) + number)
    begin = f"{work.mark} {texts.mark(number, 2)} {texts.paragraph(rng)}"
    rest = [texts.question(rng) for _ in range(TURNS - 1)]
    return [Ask(text, tokens, f"session {number + 1}") for text in (begin, *rest)]


async def drive(server: Server, work: Work) -> list[Stream]:
    """Let all conversations begin at once; each asks again as soon as it is answered."""
    count, tokens = (6, 8) if work.small else (SESSIONS, TOKENS)
    async with AsyncExitStack() as stack:
        clients = await connect(stack, server, count)
        conversations = (
            ask_in_turn(client, conversation(work, number, tokens))
            for number, client in enumerate(clients)
        )
        return [stream for turns in await together(conversations) for stream in turns]


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return how long all took, and how much was computed again."""
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
paragraph, then questions of about 20 tokens, {TOKENS} tokens of answer each; a program asks again
as soon as it is answered. A token of a history is computed twice where a turn finds less in the
caches than its conversation's last turn had computed: its input and its output but the last token,
which is drawn and not computed. Summed over all turns, from the answers' own account.""",
    figures=(
        Figure("makespan_s", "all done, s"),
        Figure("ttft_median_s", "first token, median, s"),
        Figure("computed_twice", "tokens computed twice, worst run", 0, over="max"),
        Figure("prompt_tokens", "prompt tokens computed", 0),
    ),
    targets=(
        Target("makespan_s", LLAMA_SERVER, INFERD, least=1.0),
        Target("computed_twice", INFERD, most=0),
    ),
    start=start,
    measure=measure,
)

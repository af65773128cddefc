"""Many sessions begin at once with the same long text: is it computed once or once each?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench import streams as s
from bench import texts
from bench.clients import Ask, Server, ask_together, bare_run, connect
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, LLAMA_SERVER, Scenario, Started, Work, start_pair

SLOTS = 16
CTX_SIZE = 1024
WORDS = 600
TOKENS = 24


BARE = "bare"


def asks_of(work: Work) -> list[Ask]:
    """Return what each session asks: the common text, then its own."""
    rng = work.rng()
    count, words = (4, 100) if work.small else (SLOTS, WORDS)
    common = f"{work.mark} {texts.story(rng, words)}"
    return [
        Ask(f"{common}{texts.question(rng, name)}", TOKENS, name)
        for name in texts.names(rng, count)
    ]


async def drive(server: Server, work: Work) -> list[Stream]:
    """Let all sessions ask at once."""
    asks = asks_of(work)
    async with AsyncExitStack() as stack:
        return await ask_together(await connect(stack, server, len(asks)), asks)


async def drive_bare(work: Work) -> list[Stream]:
    """Run the bare loop."""
    return await bare_run(asks_of(work), SLOTS, CTX_SIZE, share=True)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return how long all took, and how soon each began."""
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
    title="A prefix in common",
    about=f"""\
{SLOTS} new sessions ask at once: {WORDS} words that all have in common, then a question of
their own, 15 to 20 tokens; each reads {TOKENS} tokens. {SLOTS} slots of {CTX_SIZE} tokens on both
sides. **bare** is a loop around llama.cpp that does nothing else: it reads the common text in steps
of 512 tokens, copies the state, reads all questions in one step, and decodes: the most that this
machine gives.

What stops both: llama.cpp computes attention in tiles from 64 rows of a sequence on, and a question
has 17; all decoding is of single rows. Called in a loop, steps of these shapes took 4.15 s: 1.61
for the common text, however it is cut (128 to 512 rows a step), 0.92 for the questions, 1.60 for
the answers (2026-11-22, medians of 4, in a calm quarter of an hour; 4.15 to 4.9 s within two hours,
as the host went). inferd adds 0.02 s until its first step begins, 0.03 to save the common state and
to put it into 15 slots, and 0.03 between its steps; and while 16 prompts come, daemon and
clients take one of the two cores.""",
    figures=(
        Figure("makespan_s", "all done, s"),
        Figure("ttft_median_s", "first token, median, s"),
        Figure("ttft_worst_s", "first token, worst, s"),
        Figure("prompt_tokens", "prompt tokens computed", 0),
    ),
    targets=(
        Target("makespan_s", LLAMA_SERVER, INFERD, least=6.5),
        Target("ttft_median_s", LLAMA_SERVER, INFERD, least=6.0),
        Target("makespan_s", LLAMA_SERVER, BARE),
        Target("ttft_median_s", LLAMA_SERVER, BARE),
    ),
    start=start,
    measure=measure,
)

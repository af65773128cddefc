"""Attacks with ordinary work without a pause: embeddings, prompts and streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from bench.attack.attack import (
    COMPUTING,
    LOWER,
    STREAMING,
    Attack,
    Bounds,
    Guarantee,
    Target,
    run_at_once,
)
from bench.attack.requests import ERRORS, Requests, connect
from bench.texts import mark, story

TEXTS, TEXT_WORDS = 16, 200
EMBEDDING = 4
"""Requests for embeddings in flight."""
PROMPT_WORDS = 1500
PROMPTING = 32
STREAMS, STREAM_TOKENS = 98, 1024
"""With the victim's stream and the attacker's next one, all places of open sessions by default."""
STREAMS_BESIDE_OTHERS = 40
TURNS, TURN_TOKENS = 16, 8
RETRY_PAUSE_S = 0.1
Work = Callable[[Requests, random.Random], Awaitable[None]]


async def embed_texts(requests: Requests, rng: random.Random) -> None:
    """Request the embeddings of a batch of texts, as the builder of an index does."""
    await requests.embed([story(rng, TEXT_WORDS) for _ in range(TEXTS)])


async def compute_prompt(requests: Requests, rng: random.Random) -> None:
    """Send a long prompt that nobody has sent before, for one token."""
    await _answer(requests, _begin(rng) + story(rng, PROMPT_WORDS), 1)


async def stream_answer(requests: Requests, rng: random.Random) -> None:
    """Stream a long answer."""
    await _answer(requests, _begin(rng) + story(rng, 20), STREAM_TOKENS)


async def answer_shortly(requests: Requests, rng: random.Random) -> None:
    """Request a short answer to a short prompt."""
    await _answer(requests, _begin(rng) + story(rng, 20), TURN_TOKENS)


async def _answer(requests: Requests, prompt: str, tokens: int) -> None:
    async for _ in requests.stream(prompt, tokens):
        pass


def _begin(rng: random.Random) -> str:
    return mark(rng.randrange(10**8), 8) + " "


def flood(target: Target, *, work: Work, connections: int) -> None:
    """Do work on many connections at once, again and again."""

    async def repeat(number: int) -> None:
        rng = random.Random(f"{target.number} {work.__name__} {number}")
        while True:
            try:
                async with connect(target) as requests:
                    while True:
                        await work(requests, rng)
            except ERRORS:
                await anyio.sleep(RETRY_PAUSE_S)

    async def run() -> None:
        with anyio.move_on_after(target.ends_at_s - time.monotonic()):
            async with anyio.create_task_group() as group:
                for number in range(connections):
                    group.start_soon(repeat, number)

    asyncio.run(run())


embed_flood = partial(flood, work=embed_texts, connections=EMBEDDING)
prompt_flood = partial(flood, work=compute_prompt, connections=PROMPTING)
prompts_four = partial(flood, work=compute_prompt, connections=4)
streams = partial(flood, work=stream_answer, connections=STREAMS)
streams_beside_others = partial(flood, work=stream_answer, connections=STREAMS_BESIDE_OTHERS)
short_turns = partial(flood, work=answer_shortly, connections=TURNS)
_EACH = (embed_flood, prompt_flood, prompts_four, streams_beside_others, short_turns)
"""The flood of each of five users. Together they leave a place of a session for the victim."""


def flood_together(target: Target) -> None:
    """Flood with embeddings, prompts and streams at once, as one user."""
    run_at_once(target, [embed_flood, prompt_flood, streams_beside_others])


def flood_as_one_of_five(target: Target) -> None:
    """Flood with work of another kind than the other attackers do."""
    _EACH[target.number](target)


SHOWS: tuple[Guarantee, ...] = ("share", "gap", "calls", "places")
FIVE = Bounds(share_least=0.15, gap_s_max=1.0)
"""Bounds beside five users: a sixth of the time, less a tenth."""
FIVE_LOWER = Bounds(share_least=0.055, gap_s_max=2.0)
"""Bounds beside five users of a higher class: a sixteenth of the time, less a tenth."""
ATTACKS = (
    Attack("embed-flood", "Embeddings of 16 texts of 200 words, 4 requests in flight", embed_flood,
           SHOWS, COMPUTING, LOWER),
    Attack("prompt-flood", "Unique prompts of 1500 words on 32 connections", prompt_flood,
           SHOWS, COMPUTING, LOWER),
    Attack("prompts-four", "Unique prompts of 1500 words on 4 connections", prompts_four,
           SHOWS, COMPUTING, LOWER),
    Attack("streams-98", "98 endless streams", streams, SHOWS, STREAMING,
           modes=("equal", "gateway")),
    Attack("high-streams", "98 endless streams of the class `high`", streams, SHOWS, LOWER,
           modes=("lower",)),
    Attack("floods-together", "Embeddings, prompts and 40 streams of one user", flood_together,
           SHOWS, STREAMING, LOWER),
    Attack("five-attackers", "Five users: embeddings, prompts, 4 prompts, 40 streams, short turns",
           flood_as_one_of_five, SHOWS, FIVE, FIVE_LOWER, users=5),
)  # fmt: skip

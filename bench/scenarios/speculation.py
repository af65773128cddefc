"""Scenario of answers whose tokens are drafted: quotes, code, free text, many streams, and an
urgent request beside them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from bench import llama_server, texts
from bench import streams as s
from bench.clients import Client, Request, Server, send_at
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, LLAMA_SERVER, Scenario, Side, Started, Work, side_of, start_inferd

SLOTS, CTX_SIZE = 10, 1024
TOKENS, TOKENS_SMALL = 192, 16
QUOTE, CODE, FREE, MIXED, URGENT = CASES = 1, 2, 3, 4, 5
NAMES = {QUOTE: "quote", CODE: "code", FREE: "free"}
MIXED_STREAMS, MIXED_TOKENS = 8, 96
QUOTED, MOMENTS_S, URGENT_TOKENS = 4, (1.0, 2.2, 3.4), 16
PLAIN = f"{INFERD}, off"
DRAFTERS = ("ngram-simple", "ngram-mod", "ngram-cache")
"""llama-server's `--spec-type`s that need no second model."""


def quote(rng: random.Random) -> str:
    """Return a request to repeat a text, after two of its repetitions."""
    text = texts.story(rng, 110)
    return f"The text:\n{text}\n\nThe text once more:\n{text}\n\nThe text once more:\n"


def code(rng: random.Random) -> str:
    """Return a program and the request to write it again with another name."""
    [name, other] = texts.names(rng, 2)
    name, other = name.lower(), other.lower()
    lines = [
        f"def read_{name}(path):",
        f"    with open(path) as file:\n        {name} = file.read().splitlines()",
        f"    return [line.strip() for line in {name} if line.strip()]\n",
        f"def count_{name}(path):",
        f"    {name} = read_{name}(path)",
        f"    counts = {{}}\n    for line in {name}:",
        "        counts[line] = counts.get(line, 0) + 1",
        "    return sorted(counts.items(), key=lambda item: item[1])\n",
    ]
    program = "\n".join(lines)
    return f"# Version 1\n{program}\n\n# Version 2: '{name}' is renamed to '{other}'\n"


def request_of(work: Work, kind: int, rng: random.Random, label: str, tokens: int) -> Request:
    """Return a request of a *kind*, one of `NAMES`."""
    text = {QUOTE: quote, CODE: code, FREE: texts.paragraph}[kind](rng)
    return Request(f"{work.mark} {text}", TOKENS_SMALL if work.small else tokens, label)


def requests_of(work: Work) -> list[Request]:
    """Return the requests of a run; the urgent ones come last."""
    rng = work.rng()
    if work.case in NAMES:
        return [request_of(work, work.case, rng, NAMES[work.case], TOKENS)]
    if work.case == MIXED:
        kinds = [list(NAMES)[number % len(NAMES)] for number in range(MIXED_STREAMS)]
        return [
            request_of(work, kind, rng, f"{NAMES[kind]} {number + 1}", MIXED_TOKENS)
            for number, kind in enumerate(kinds)
        ]
    quotes = [
        request_of(work, QUOTE, rng, f"quote {number + 1}", TOKENS) for number in range(QUOTED)
    ]
    return quotes + [
        Request(f"{work.mark}{n}{texts.question(rng)}", URGENT_TOKENS, f"urgent {n + 1}", "urgent")
        for n in range(len(MOMENTS_S))
    ]


async def drive(server: Server, work: Work, speculation: str = "auto") -> list[Stream]:
    """Send the requests at once, the urgent ones at their moments."""
    requests = [replace(request, speculation=speculation) for request in requests_of(work)]
    urgent = sum(request.priority == "urgent" for request in requests)
    moments_s = [0.0] * (len(requests) - urgent) + [*MOMENTS_S][:urgent]
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(server.client(slot)) for slot in range(len(requests))
        ]
        return await send_at(clients, requests, moments_s)


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the rate of the streams from the first piece on, and the worst urgent first token."""
    s.check_complete(streams)
    others = [stream for stream in streams if stream.priority != "urgent"]
    urgent = [stream.ttft_s for stream in streams if stream.priority == "urgent"]
    begin_s = min(stream.first_s for stream in others)
    tokens = sum(stream.tokens for stream in others)
    return {
        "tokens_per_s": tokens / (max(stream.ended_s for stream in others) - begin_s),
        "urgent_ttft_s": max(urgent, default=0.0),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon, a llama-server without drafts, and one for each of its drafters."""
    sides: dict[str, Side] = {}
    for name, flags in [
        (LLAMA_SERVER, ()),
        *((f"{LLAMA_SERVER}, {kind}", ("--spec-type", kind)) for kind in DRAFTERS),
    ]:
        server = await stack.enter_async_context(llama_server.running(SLOTS, CTX_SIZE, flags))
        sides[name] = side_of(drive, server)
    own = await start_inferd(stack, SLOTS, CTX_SIZE)
    sides[PLAIN] = partial(drive, own, speculation="off")
    sides[INFERD] = partial(drive, own)
    return Started(sides, {})


def _targets() -> list[Target]:
    rates = {QUOTE: 1.3, CODE: 1.0, FREE: 0.98, MIXED: 1.0}
    return [
        *(
            Target("tokens_per_s", INFERD, PLAIN, least=least, case=case)
            for case, least in rates.items()
        ),
        *(
            Target("tokens_per_s", INFERD, f"{LLAMA_SERVER}, {kind}", least=1.0, case=QUOTE)
            for kind in DRAFTERS
        ),
        Target("urgent_ttft_s", INFERD, PLAIN, most=1.1, case=URGENT),
    ]


SCENARIO = Scenario(
    name="speculation",
    title="Speculative decoding",
    about=f"""\
Answers of {TOKENS} tokens whose tokens are drafted. Case {QUOTE}: the model goes on with a text
that the prompt has twice. Case {CODE}: it writes a program of the prompt again, with another name.
Case {FREE}: the beginning of a story. Case {MIXED}: {MIXED_STREAMS} streams of these three kinds at
once, of {MIXED_TOKENS} tokens. Case {URGENT}: {QUOTED} streams of case {QUOTE}, and beside them
{len(MOMENTS_S)} short urgent requests. Tokens per second are those from the first piece on, without
the prompts and the urgent answers. In case {MIXED} that favours llama-server, which computes all
prompts before its first token: inferd streams the first answers while it computes the other
prompts, and that time counts.

**inferd** drafts by its default, the n-gram drafter of each session; **inferd, off** is the same
daemon with `speculation: off` in the requests. **llama-server** runs without drafts, and with each
of its drafters that need no second model, with their default sizes.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("urgent_ttft_s", "urgent: worst first token, s", 3, over="max"),
    ),
    targets=tuple(_targets()),
    start=start,
    measure=measure,
    cases=CASES,
    case_heading="case",
    pictures=(),
)

"""Scenario of several programs that use three models in turn, with memory for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench import daemon, texts
from bench import streams as s
from bench.clients import Request, gather_all
from bench.daemon import StreamClient
from bench.machine import MODEL
from bench.runs import Figure, Target
from bench.streams import Stream

from .base import INFERD, Scenario, Side, Started, Work

MODELS = ("extract", "reason", "write")
PIPELINES = 4
ROUNDS = 10
SLOTS = 4
CTX_SIZE = 1536
WORDS = 100
TOKENS = 12
MEMORY_BYTES = 500_000_000
"""One model with its slots takes 322 MB of it."""
RESIDENCY_S = 5.0
WAIT_S_MAX = 2 * (RESIDENCY_S + 4.0)
"""A residency, a turn and a load for each of two other models. Turns and loads each take under 2 s.
"""
IN_ORDER = "inferd, in order of arrival"
COUNTED_TWICE_MAX = 2
"""Tokens of a history that a return computes again: the last one, and one at a token boundary."""


def label_of(pipeline: int, model: str) -> str:
    """Return the name of a conversation."""
    return f"{pipeline} {model}"


def model_of(stream: Stream) -> str:
    """Return the model that computed a stream."""
    return stream.label.split()[1]


async def run_pipeline(server: daemon.Inferd, work: Work, pipeline: int) -> list[Stream]:
    """Use the three models in turn; each pipeline begins with another model."""
    rng = work.rng()
    clients: dict[str, StreamClient] = {}
    found = []
    async with AsyncExitStack() as stack:
        for model in MODELS:
            client = server.client(session_id=f"{work.serial} {pipeline} {model}", model=model)
            clients[model] = await stack.enter_async_context(client)
        for step in range((2 if work.small else ROUNDS) * len(MODELS)):
            model = MODELS[(pipeline + step) % len(MODELS)]
            first = step < len(MODELS)
            content = texts.story(rng, WORDS) if first else texts.question(rng)
            text = f"{work.mark} {pipeline} {step} {content}"
            found.append(
                await clients[model].send_request(Request(text, TOKENS, label_of(pipeline, model)))
            )
    return found


def side_of(server: daemon.Inferd) -> Side:
    """Return the side that runs all pipelines on *server*."""

    async def side(work: Work) -> list[Stream]:
        calls = (run_pipeline(server, work, p) for p in range(PIPELINES))
        return [stream for streams in await gather_all(calls) for stream in streams]

    return side


def loads(streams: Sequence[Stream]) -> int:
    """Return how often a model was loaded.

    Memory holds one model. So each turn of another model than that of the previous turn meant a
    load.
    """
    models = [model_of(stream) for stream in sorted(streams, key=lambda s: s.first_s)]
    return sum(one != other for one, other in zip(models, ["", *models], strict=False))


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the loads, the longest wait, and the tokens computed again."""
    s.check_complete(streams)
    turns = s.by_label(streams).values()
    return {
        "loads": loads(streams),
        "wait_worst_s": max(stream.ttft_s for stream in streams),
        "makespan_s": s.makespan_s(streams),
        "computed_twice": sum(s.computed_twice(conversation) for conversation in turns),
        "returns": sum(len(conversation) - 1 for conversation in turns),
        "lost": sum(stream.lost for stream in streams),
    }


def configuration(residency_s: float) -> str:
    """Return a daemon's configuration: three names for one file, and memory for one model."""
    settings: Mapping[str, Any] = {"memory-bytes": MEMORY_BYTES, "residency-s": residency_s}
    text = daemon.configuration(SLOTS, CTX_SIZE, settings)
    return text + "".join(f'\n[models.{name}]\nfile = "{MODEL}"\n' for name in MODELS)


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon for each side."""
    sides: dict[str, Side] = {}
    for name, residency_s in ((INFERD, RESIDENCY_S), (IN_ORDER, 0.0)):
        server = await stack.enter_async_context(daemon.running(configuration(residency_s)))
        sides[name] = side_of(server)
    return Started(sides, {})


SCENARIO = Scenario(
    name="pipeline",
    title="Three models, with memory for one",
    about=f"""\
{PIPELINES} programs use three models ({", ".join(MODELS)}: one file under three names) in turn,
{ROUNDS} times each, each model in a session of its own with an id; each program begins with
another model. Memory holds one of the three (`memory-bytes`). **{INFERD}** admits requests for the
loaded model first for `residency-s` = {RESIDENCY_S:g}; **{IN_ORDER}** is the same with 0. A load is
counted wherever the first token of a turn comes from another model than the previous turn's first
token. The limit of the wait, {WAIT_S_MAX:g} s, is a residency, the longest turn and a load for
each of the two other models. A session begins with {WORDS} words and continues with questions.
{SLOTS} slots of {CTX_SIZE} tokens, {TOKENS} tokens an answer.""",
    figures=(
        Figure("loads", "loads", 0),
        Figure("wait_worst_s", "longest wait for a first token, s"),
        Figure("makespan_s", "all done, s"),
        Figure("computed_twice", "history tokens computed again", 0, over="max"),
        Figure("returns", "returns to a session", 0),
        Figure("lost", "turns lost", 0, over="max"),
    ),
    targets=(
        Target("lost", INFERD, most=0),
        Target("loads", INFERD, IN_ORDER, most=0.5),
        Target("wait_worst_s", INFERD, most=WAIT_S_MAX),
        Target(
            "computed_twice",
            INFERD,
            most=COUNTED_TWICE_MAX * PIPELINES * len(MODELS) * (ROUNDS - 1),
        ),
    ),
    start=start,
    measure=measure,
    pictures=(INFERD,),
)

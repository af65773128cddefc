"""Scenario of the first token with a JSON schema, one never used before and one seen before."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

from bench import daemon, texts
from bench import streams as s
from bench.clients import Request
from bench.runs import Figure, Target
from bench.schemas import Schema, different_schemas, never_used
from bench.streams import Stream
from tools.get_models import MODELS_DIR

from .base import Scenario, Side, Started, Work, start_inferd
from .constrained import VOCABULARIES

SLOTS = 1
CTX_SIZE = 512
SCHEMAS, SCHEMAS_SMALL = 100, 5
"""Schemas of a run; the next round uses others."""
TOKENS = 2
FREE, NEW, SEEN = "free", "new", "seen"
KINDS = (FREE, NEW, SEEN)
NEW_LATER_MS_MAX, SEEN_LATER_MS_MAX = 50.0, 5.0
SERIAL_DIGITS = 8


def requests(work: Work, schemas: Sequence[Schema]) -> list[Request]:
    """Return for each schema a request without it, one with it, and one with it again."""
    found: list[Request] = []
    for number, schema in enumerate(_part_of(work, schemas)):
        for kind in KINDS:
            serial = 1000 * work.serial + len(found)
            text = f"{texts.mark(serial, SERIAL_DIGITS)} The answer is:"
            new = never_used(schema, 1000 * work.serial + number)
            found.append(Request(text, TOKENS, kind, schema=None if kind == FREE else new))
    return found


def _part_of(work: Work, schemas: Sequence[Schema]) -> list[Schema]:
    count = SCHEMAS_SMALL if work.small else SCHEMAS
    begin = work.round * SCHEMAS
    return [schemas[(begin + number) % len(schemas)] for number in range(count)]


async def drive(
    server: daemon.Inferd, model: str, schemas: Sequence[Schema], work: Work
) -> list[Stream]:
    """Send the requests one after another, each in a session of its own."""
    streams = []
    for request in requests(work, schemas):
        async with server.client(model=model) as client:
            streams.append(await client.send_request(request))
    return streams


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return how much later a first token came with a schema than without, for each schema."""
    for stream in streams:  # an answer ends where its schema is complete, so it may be short
        assert stream.arrivals_s and not stream.error, stream.error or "no answer"
    s.check_cold(streams)
    free, new, seen = (
        [1000 * stream.ttft_s for stream in streams if stream.label == kind] for kind in KINDS
    )
    new_later = [a - b for a, b in zip(new, free, strict=True)]
    seen_later = [a - b for a, b in zip(seen, free, strict=True)]
    return {
        "new_later_p99_ms": s.percentile(new_later, 0.99),
        "seen_later_p99_ms": s.percentile(seen_later, 0.99),
        "new_later_p50_ms": statistics.median(new_later),
        "seen_later_p50_ms": statistics.median(seen_later),
        "free_p50_ms": statistics.median(free),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with both models."""
    server = await start_inferd(stack, SLOTS, CTX_SIZE)
    schemas = different_schemas()
    sides: dict[str, Side] = {}
    for vocabulary, file in VOCABULARIES.items():
        model = (MODELS_DIR / file).stem
        await server.keep_loaded(stack, model)
        sides[vocabulary] = partial(drive, server, model, schemas)
    return Started(sides, {"different schemas": str(len(schemas))})


SCENARIO = Scenario(
    name="first-schema",
    title="The first answer to a JSON schema",
    about=f"""\
One request after another, each in a session of its own with a short new prompt: without a schema,
with one that was never used before, and with the same one again, for {SCHEMAS} different schemas of
schemastore.org a round. A figure is how much later the first token came than without the schema.
**49k** is SmolLM2 135M, **262k** Gemma 3 270M.""",
    figures=(
        Figure("new_later_p99_ms", "never used before: later, p99, ms", 1),
        Figure("seen_later_p99_ms", "seen before: later, p99, ms", 1),
        Figure("new_later_p50_ms", "never used before: later, p50, ms", 1),
        Figure("seen_later_p50_ms", "seen before: later, p50, ms", 1),
        Figure("free_p50_ms", "without: first token, p50, ms", 1),
    ),
    targets=tuple(
        target
        for vocabulary in VOCABULARIES
        for target in (
            Target("new_later_p99_ms", vocabulary, most=NEW_LATER_MS_MAX),
            Target("seen_later_p50_ms", vocabulary, most=SEEN_LATER_MS_MAX),
        )
    ),
    start=start,
    measure=measure,
    pictures=(),
)

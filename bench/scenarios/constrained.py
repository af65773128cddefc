"""Scenarios that compare answers to a JSON schema with free text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from bench import daemon, llama_server
from bench.clients import Client, Request, send_together
from bench.runs import Figure, Target
from bench.schemas import Schema
from bench.streams import Stream
from tools.get_models import MODELS_DIR, SOURCES

from . import decode
from .base import LLAMA_SERVER, Scenario, Side, Started, Work, start_inferd

VOCABULARIES: Mapping[str, str] = {"49k": SOURCES["smollm2"].file, "262k": SOURCES["gemma3"].file}
"""Files of models, by the number of their tokens."""
Requests = Callable[[Work], list[Request]]
"""Returns the requests without their schema, one per stream."""


def scenario(
    name: str,
    title: str,
    about: str,
    requests_of: Requests,
    schema: Schema,
    *,
    slots: int,
    ctx_size: int,
    share_min: float,
    cases: tuple[int, ...],
) -> Scenario:
    """Return the scenario of these requests. Each of *cases* is a number of streams. The target is
    that streams with the schema get at least *share_min* of the tokens per second of free text.
    """
    return Scenario(
        name=name,
        title=title,
        about=about,
        figures=(
            Figure("tokens_per_s", "tokens/s", 1),
            Figure("ttft_ms", "first token, ms", 1),
            Figure("gap_p50_ms", "gap p50, ms", 1),
            Figure("gap_p99_ms", "gap p99, ms", 1),
        ),
        targets=tuple(
            target
            for vocabulary in VOCABULARIES
            for case in cases
            for target in _targets(vocabulary, case, share_min)
        ),
        start=partial(
            start_sides, slots=slots, ctx_size=ctx_size, requests_of=requests_of, schema=schema
        ),
        measure=decode.measure,
        cases=cases,
        case_heading="streams",
        pictures=(),
        picture_case=cases[-1],
    )


def _targets(vocabulary: str, case: int, share_min: float) -> tuple[Target, Target]:
    own = constrained(vocabulary)
    return (
        Target("tokens_per_s", own, free_text(vocabulary), least=share_min, case=case),
        Target("tokens_per_s", own, reference(vocabulary), case=case),
    )


def free_text(vocabulary: str) -> str:
    """Return the name of inferd's side without a schema."""
    return f"{vocabulary} free text"


def constrained(vocabulary: str) -> str:
    """Return the name of inferd's side with the schema."""
    return f"{vocabulary} schema"


def reference(vocabulary: str) -> str:
    """Return the name of llama-server's side, with the schema."""
    return f"{vocabulary} {LLAMA_SERVER}"


async def drive_inferd(
    server: daemon.Inferd, model: str, requests_of: Requests, schema: Schema | None, work: Work
) -> list[Stream]:
    """Stream from inferd."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(server.client(model=model)) for _ in range(work.case)
        ]
        return await _send(clients, requests_of(work), schema)


async def drive_llama_server(
    server: llama_server.LlamaServer, requests_of: Requests, schema: Schema, work: Work
) -> list[Stream]:
    """Stream from llama-server in neighbouring slots."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = [
            await stack.enter_async_context(server.client(slot)) for slot in range(work.case)
        ]
        return await _send(clients, requests_of(work), schema)


async def _send(
    clients: Sequence[Client], requests: Sequence[Request], schema: Schema | None
) -> list[Stream]:
    streams = await send_together(clients, [replace(r, schema=schema) for r in requests])
    if schema is not None:
        for client, stream in zip(clients, streams, strict=True):
            begins = client.last_answer.lstrip().startswith("{")
            assert begins or stream.error, f"no object: {client.last_answer[:80]!r}"
    return streams


async def start_sides(
    stack: AsyncExitStack, slots: int, ctx_size: int, requests_of: Requests, schema: Schema
) -> Started:
    """Start a daemon with both models, and a llama-server for each."""
    server = await start_inferd(stack, slots, ctx_size)
    sides: dict[str, Side] = {}
    for vocabulary, file in VOCABULARIES.items():
        path = MODELS_DIR / file
        await server.keep_loaded(stack, path.stem)
        other = await stack.enter_async_context(
            llama_server.running(slots, ctx_size, llama_server.NO_CACHES, path)
        )
        drive = partial(drive_inferd, server, path.stem, requests_of)
        sides[reference(vocabulary)] = partial(drive_llama_server, other, requests_of, schema)
        sides[free_text(vocabulary)] = partial(drive, None)
        sides[constrained(vocabulary)] = partial(drive, schema)
    return Started(sides, {})

"""Scenario of a draft model: a model of 1.1 billion random weights, whose decoding is bound by
memory, and a copy of it with fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from bench import daemon, llama_server, texts
from bench.clients import Request
from bench.large_model import DRAFT_LAYERS, LATER_SCALE, LAYERS, write_large
from bench.runs import Figure, Target
from bench.streams import Stream
from tools.build_engine import ROOT

from .base import INFERD, LLAMA_SERVER, Scenario, Side, Started, Work
from .speculation import PLAIN, measure

FOLDER = ROOT / ".cache" / "large-model"
SLOTS, CTX_SIZE = 2, 1024
TOKENS, TOKENS_SMALL = 96, 8
DRAFT, NGRAM = f"{INFERD}, draft", f"{INFERD}, ngram"
REFERENCE_DRAFT, REFERENCE_NGRAM = f"{LLAMA_SERVER}, draft-simple", f"{LLAMA_SERVER}, ngram-mod"
MODEL_NAME = "large"


async def drive_llama_server(server: llama_server.LlamaServer, work: Work) -> list[Stream]:
    """Request an answer."""
    async with server.client() as client:
        return [await client.send_request(_request(work))]


async def drive_inferd(server: daemon.Inferd, speculation: str, work: Work) -> list[Stream]:
    """Request an answer with a drafter."""
    async with server.client(model=MODEL_NAME) as client:
        return [await client.send_request(_request(work, speculation))]


def _request(work: Work, speculation: str = "auto") -> Request:
    text = f"{work.mark} {texts.paragraph(work.rng())}"
    return Request(text, TOKENS_SMALL if work.small else TOKENS, "free", speculation=speculation)


async def start(stack: AsyncExitStack) -> Started:
    """Start a llama-server for each drafter, and a daemon with both models."""
    model, draft = write_large(FOLDER), write_large(FOLDER, DRAFT_LAYERS)
    kinds: dict[str, Sequence[str]] = {
        LLAMA_SERVER: (),
        REFERENCE_DRAFT: ("--spec-type", "draft-simple", "-md", str(draft)),
        REFERENCE_NGRAM: ("--spec-type", "ngram-mod"),
    }
    sides: dict[str, Side] = {}
    for name, flags in kinds.items():
        server = await stack.enter_async_context(
            llama_server.running(SLOTS, CTX_SIZE, flags, model)
        )
        sides[name] = partial(drive_llama_server, server)
    own = await stack.enter_async_context(daemon.running(_configuration(model, draft)))
    await own.keep_loaded(stack, MODEL_NAME)
    for name, speculation in ((PLAIN, "off"), (DRAFT, "draft"), (NGRAM, "ngram")):
        sides[name] = partial(drive_inferd, own, speculation)
    return Started(sides, {})


def _configuration(model: Path, draft: Path) -> str:
    text = daemon.configuration(SLOTS, CTX_SIZE)
    return f'{text}\n[models.{MODEL_NAME}]\nfile = "{model}"\ndraft-model = "{draft}"\n'


SCENARIO = Scenario(
    name="draft-model",
    title="A draft model",
    about=f"""\
An answer of {TOKENS} tokens by a model of TinyLlama's shape: {LAYERS} layers, 1.1 billion random
weights in Q4_0. The layers behind the first {DRAFT_LAYERS} add {LATER_SCALE:g} times as much as
these, so that a copy with only the first {DRAFT_LAYERS} layers, the draft model, often expects the
same token. Tokens per second are those from the first piece on.

**inferd** computes with the draft model, with the n-gram drafter, and without drafts, as requests
ask for; it verifies drafts only where it expects to be faster. **llama-server** runs without
drafts, with the draft model, and with `ngram-mod`.""",
    figures=(Figure("tokens_per_s", "tokens/s", 1),),
    targets=(
        Target("tokens_per_s", DRAFT, PLAIN, least=0.98),
        Target("tokens_per_s", NGRAM, PLAIN, least=0.98),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

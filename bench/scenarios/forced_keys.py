"""Scenario of a JSON schema whose long names a grammar forces."""

from __future__ import annotations

from contextlib import AsyncExitStack

from bench import texts
from bench.clients import Request
from bench.runs import Figure, Target
from bench.schemas import FORMS

from . import decode
from .base import Scenario, Started, Work
from .constrained import VOCABULARIES, constrained, free_text, reference, start_sides

SLOTS = 1
CTX_SIZE = 512
TOKENS, TOKENS_SMALL = 128, 32
GAIN_MIN = 1.4


def requests(work: Work) -> list[Request]:
    """Return a prompt of 30 to 40 tokens."""
    rng = work.rng()
    tokens = TOKENS_SMALL if work.small else TOKENS
    return [Request(f"{work.mark} {texts.question(rng)} The forms are:", tokens)]


async def start(stack: AsyncExitStack) -> Started:
    """Start the servers."""
    return await start_sides(stack, SLOTS, CTX_SIZE, requests, FORMS)


SCENARIO = Scenario(
    name="forced-keys",
    title="Names that a schema forces",
    about=f"""\
One stream sends a prompt of 30 to 40 tokens and reads {TOKENS} tokens, of free text or of a JSON
list of forms with six fields, whose names have 30 to 40 letters and whose values are short. The
schema's separators are the default ones, with spaces. A grammar forces most of the answer. **49k**
is SmolLM2 135M, **262k** Gemma 3 270M; **llama-server** gets the same schema.""",
    figures=(
        Figure("tokens_per_s", "tokens/s", 1),
        Figure("ttft_ms", "first token, ms", 1),
        Figure("gap_p50_ms", "gap p50, ms", 1),
        Figure("gap_p99_ms", "gap p99, ms", 1),
    ),
    targets=tuple(
        target
        for vocabulary in VOCABULARIES
        for target in (
            Target(
                "tokens_per_s",
                constrained(vocabulary),
                free_text(vocabulary),
                least=GAIN_MIN,
                case=1,
            ),
            Target("tokens_per_s", constrained(vocabulary), reference(vocabulary), case=1),
        )
    ),
    start=start,
    measure=decode.measure,
    cases=(1,),
    case_heading="streams",
    pictures=(),
    picture_case=1,
)

"""Scenario of a JSON schema whose long names a grammar forces."""

from __future__ import annotations

from bench import texts
from bench.clients import Request
from bench.schemas import FORMS

from .base import Work
from .constrained import scenario

TOKENS, TOKENS_SMALL = 128, 32
GAIN_MIN = 1.4


def requests(work: Work) -> list[Request]:
    """Return a prompt of 30 to 40 tokens."""
    rng = work.rng()
    tokens = TOKENS_SMALL if work.small else TOKENS
    return [Request(f"{work.mark} {texts.question(rng)} The forms are:", tokens)]


SCENARIO = scenario(
    name="forced-keys",
    title="Names that a schema forces",
    about=f"""\
One stream sends a prompt of 30 to 40 tokens and reads {TOKENS} tokens, of free text or of a JSON
list of forms with six fields, whose names have 30 to 40 letters and whose values are short. The
schema's separators are the default ones, with spaces. A grammar forces most of the answer. **49k**
is SmolLM2 135M, **262k** Gemma 3 270M; **llama-server** gets the same schema.""",
    requests_of=requests,
    schema=FORMS,
    slots=1,
    ctx_size=512,
    share_min=GAIN_MIN,
    cases=(1,),
)

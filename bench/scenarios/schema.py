"""Scenario of answers to a JSON schema: the cost of constrained output."""

from __future__ import annotations

from bench import texts
from bench.clients import Request
from bench.schemas import STOCK

from .base import Work
from .constrained import scenario

CASES = (1, 4, 16)
SLOTS = 16
CTX_SIZE = 512
TOKENS, TOKENS_SMALL = 64, 16
SHARE_MIN = 0.95


def requests(work: Work) -> list[Request]:
    """Return distinct prompts of 30 to 40 tokens, one per stream."""
    rng = work.rng()
    tokens = TOKENS_SMALL if work.small else TOKENS
    return [
        Request(f"{work.mark} {texts.question(rng, name)} The shop's stock is:", tokens, name)
        for name in texts.names(rng, work.case)
    ]


SCENARIO = scenario(
    name="schema",
    title="Answers to a JSON schema",
    about=f"""\
Each stream sends a prompt of 30 to 40 tokens and reads {TOKENS} tokens, of free text or of a JSON
object: a shop with a list of items, which have a name, a description, a category, a price, a
count, tags and a truth value. The list is longer than the answer. The same prompts go to SmolLM2
135M with its 49 152 tokens and to Gemma 3 270M with its 262 144. **llama-server** gets the same
schema and runs without prompt caches. Tokens per second are the generated tokens divided by the
time of the whole run. A text that the schema forces is sent before its tokens are computed, so a
longer gap follows it. {SLOTS} slots of {CTX_SIZE} tokens.""",
    requests_of=requests,
    schema=STOCK,
    slots=SLOTS,
    ctx_size=CTX_SIZE,
    share_min=SHARE_MIN,
    cases=CASES,
)

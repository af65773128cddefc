"""Scenario of a large vocabulary: the share of a step that sampling takes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from bench import streams as s
from bench.runs import Figure, Target
from bench.sampling_engine import CTX_SIZE, PROMPT_TOKENS
from bench.streams import Stream
from tools.build_engine import ROOT

from .base import Scenario, Started, Work

CASES = (16,)
TOKENS, TOKENS_SMALL = 64, 6
GREEDY, DEFAULT, PENALTIES, WHOLE = (
    "greedy", "default chain", "with penalties", "default chain, all tokens"
)  # fmt: skip
FIELDS: dict[str, Mapping[str, Any]] = {
    GREEDY: {"temp": 0.0},
    DEFAULT: {},
    PENALTIES: {"repeat_penalty": 1.1, "presence_penalty": 0.5},
    WHOLE: {},
}
SHARE_MAX = 15.0


async def drive(side: str, work: Work) -> list[Stream]:
    """Sample the case's streams in a process of its own."""
    tokens = TOKENS_SMALL if work.small else TOKENS
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.sampling_engine"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    job = json.dumps([FIELDS[side], side == WHOLE, work.case, tokens])
    out, _ = await process.communicate(job.encode())
    if process.returncode != 0:
        raise SystemExit(f"the engine ended with status {process.returncode}")
    return [
        Stream(requested_s, tuple(times), len(times), tokens, str(number), sampling_s=sampling_s)
        for number, (requested_s, times, sampling_s) in enumerate(json.loads(out))
    ]


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the mean step, its sampling time, and the share.

    The step of the first token is left out, because it also computed the prompts.
    """
    s.check_complete(streams)
    steps = streams[0].tokens - 1
    begin_s = max(stream.first_s for stream in streams)
    step_s = (max(stream.ended_s for stream in streams) - begin_s) / steps
    sampling_s = sum(stream.sampling_s for stream in streams) / steps
    return {
        "share": 100 * sampling_s / step_s,
        "sampling_ms": 1000 * sampling_s,
        "step_ms": 1000 * step_s,
    }


async def start(stack: AsyncExitStack) -> Started:
    """Return the sides; no server runs between runs."""
    return Started({side: partial(drive, side) for side in FIELDS}, {})


SCENARIO = Scenario(
    name="sampling",
    title="Sampling",
    about=f"""\
The worker's engine runs in a process of its own, on Gemma 3 270M with its 262 144 tokens: prompts
of {PROMPT_TOKENS} tokens, {TOKENS} tokens sampled for each, slots of {CTX_SIZE} tokens. A step is
the time between two tokens; sampling is the part of it that `Model.sample` takes for all streams
together.

- **{GREEDY}** takes the most probable token. **{DEFAULT}** is the default (top-k 40, top-p, min-p,
  temperature). **{PENALTIES}** adds repetition and presence penalties.
- **{WHOLE}** makes a candidate of every token, as `llama_sampler_sample` does. The others find the
  few tokens that their chain can select, and make candidates of these.""",
    figures=(
        Figure("share", "sampling, % of a step", 1),
        Figure("sampling_ms", "sampling, ms a step", 2),
        Figure("step_ms", "step, ms", 1),
    ),
    targets=(
        Target("share", DEFAULT, most=SHARE_MAX, case=16),
        Target("share", PENALTIES, most=SHARE_MAX, case=16),
        Target("sampling_ms", DEFAULT, WHOLE, case=16),
    ),
    start=start,
    measure=measure,
    cases=CASES,
    case_heading="streams",
    pictures=(),
    picture_case=16,
)

"""The steps of a long prompt beside streams, with the cost that a new worker learns meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from inferd.backends import SamplingParams
from inferd.scheduler.messages import TaskSpec, pack_tokens
from inferd.scheduler.owner import Owner, OwnerClock
from inferd.scheduler.policy.batch_plan import plan_tokens
from inferd.scheduler.policy.cost import StepCost, StepLoad
from inferd.scheduler.policy.order import Order
from inferd.scheduler.settings import EngineSettings
from inferd.scheduler.task import Task

SETTINGS = EngineSettings()
PROMPT_TOKENS, STREAMS = 1416, 3
UBATCH_S, TOKEN_S, POSITION_S = 0.004, 0.0029, 2.4e-6
"""The cost on a CPU with a small model."""
NOISE = 0.05


def task(number: int, tokens: int) -> Task:
    packed = pack_tokens(range(tokens))
    spec = TaskSpec(id=number, owner=Owner(1), tokens=packed, sampling=SamplingParams())
    return Task.from_spec(spec, arrival=number, clock=0, now=0.0)


def compute_step(tasks: Sequence[Task], cost: StepCost, rng: random.Random) -> float:
    """Plan, compute and learn a step; return its seconds without noise."""
    plan = plan_tokens(tasks, Order(0, OwnerClock(), SETTINGS), SETTINGS, 2048, cost)
    load = StepLoad.of_chunks([(part.task.computed, part.count) for part in plan])
    seconds = UBATCH_S * load.ubatches + TOKEN_S * load.tokens + POSITION_S * load.depth
    cost.learn_step(load, seconds * rng.gauss(1, NOISE))
    for part in plan:
        part.task.computed += part.count
        if not part.task.pending:
            part.task.tokens.append(1)
    return seconds


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_a_first_long_prompt_beside_streams_keep_to_their_target(
    seed: int,
) -> None:
    cost, rng = StepCost(), random.Random(seed)
    streams = [task(number, 77) for number in range(STREAMS)]
    for stream in streams:
        while stream.prefilling:
            compute_step([stream], cost, rng)
        stream.first_logits_at = -100.0
    for _ in range(60):
        compute_step(streams, cost, rng)
    prompt, seconds = task(10, PROMPT_TOKENS), []
    while prompt.prefilling:
        seconds.append(compute_step([*streams, prompt], cost, rng))
    assert max(seconds) < 1.2 * SETTINGS.step_s_target
    assert min(seconds[:-1]) > 0.7 * SETTINGS.step_s_target

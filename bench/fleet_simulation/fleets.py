"""The fleets that are simulated: models, nodes and traffic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from inferd.scheduler.policy.cost import CostCoefficients, StepCost
from tools.build_engine import ROOT

from .node import ModelKind
from .simulation import Scenario
from .traffic import Traffic

COSTS_FILE = ROOT / "bench" / "results" / "fleet-step-cost.json"
"""The step cost that a daemon has learned for SmolLM2-135M; `--calibrate` writes it."""
GIB = 1 << 30
ENOUGH, LITTLE = 9 * GIB, 6 * GIB
"""Memory of a node for all four models, which are then loaded at the begin, or for two or three."""
KV_BYTES = 2 * GIB
WARM_UP_S_MAX, WARM_UP_SHARE = 1200.0, 1 / 6
"""The time before a run that is not measured: a share of the run, within a bound."""
SESSIONS_PER_S = 0.0032
"""New sessions of a node at the mean hour: about a thousand turns a day."""
LOSSES_PER_DAY = 0.5
"""Losses of each node."""
PEAK_S = 13 * 3600.0


class Size(NamedTuple):
    """A model. *factor* is its ratio to SmolLM2-135M in the time of a step; a quarter of it is that
    in the bytes of a token.
    """

    name: str
    factor: float
    need_bytes: int


SIZES: Sequence[Size] = (
    Size("chat", 10, 2 * GIB),
    Size("large", 20, 4 * GIB),
    Size("code", 10, 2 * GIB),
    Size("small", 5, 1 * GIB),
)
"""The models, the most popular first."""
SMOLLM2_TOKEN_BYTES = 23_040
LOAD_BYTES_S, LOAD_S_MIN = 500e6, 1.0


def scaled(known: CostCoefficients, factor: float) -> StepCost:
    """Return the costs of a model whose steps take *factor* times as long."""
    return StepCost.from_coefficients(CostCoefficients(*(factor * seconds for seconds in known)))


def model_kinds(known: CostCoefficients) -> dict[str, ModelKind]:
    """Return the models of the fleet."""
    return {
        size.name: ModelKind(
            name=size.name,
            cost=scaled(known, size.factor),
            slots=4,
            need_bytes=size.need_bytes,
            load_s=LOAD_S_MIN + size.need_bytes / LOAD_BYTES_S,
            token_bytes=round(SMOLLM2_TOKEN_BYTES * size.factor / 4),
            kv_bytes=KV_BYTES,
        )
        for size in SIZES
    }


def known_cost() -> CostCoefficients:
    """Return the step cost of the last calibration."""
    return CostCoefficients(**json.loads(COSTS_FILE.read_text()))


def scenario(
    nodes: int,
    seconds: float,
    begin_s: float = 0.0,
    memory_bytes: int = ENOUGH,
    losses_per_day: float = LOSSES_PER_DAY,
    seed: int = 1,
) -> Scenario:
    """Return a fleet of *nodes* with the traffic of *seconds*."""
    names = [size.name for size in SIZES]
    traffic = Traffic(
        nodes, SESSIONS_PER_S, names, seed, begin_s=begin_s, losses_per_day=losses_per_day
    )
    warm_up = min(WARM_UP_S_MAX, WARM_UP_SHARE * seconds)
    return Scenario(traffic, model_kinds(known_cost()), memory_bytes, seconds, warm_up)


class Fleet(NamedTuple):
    """A fleet that is simulated: nodes, seconds, the time of day at the begin."""

    nodes: int
    seconds: float
    begin_s: float = 0.0
    memory_bytes: int = ENOUGH
    losses_per_day: float = LOSSES_PER_DAY
    seeds: int = 1
    """The seeds of the traffic are 1 to this number."""

    def scenario(self, seed: int) -> Scenario:
        """Return what is simulated with a seed."""
        return scenario(*self[:-1], seed)


FLEETS: Mapping[str, Fleet] = {
    "10 nodes, a day": Fleet(10, 86400.0, seeds=3),
    "10 nodes, a day without losses": Fleet(10, 86400.0, losses_per_day=0.0, seeds=3),
    "10 nodes, little memory": Fleet(10, 6 * 3600.0, 8 * 3600.0, LITTLE, seeds=3),
    "100 nodes, two hours": Fleet(100, 7200.0, 10 * 3600.0, seeds=2),
    "100 nodes, a day": Fleet(100, 86400.0),
    "1000 nodes, an hour": Fleet(1000, 3600.0, PEAK_S),
}

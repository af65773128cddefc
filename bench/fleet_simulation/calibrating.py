"""The calibration: `python -m bench.fleet_simulation --calibrate`.

A trace runs on a real daemon over its socket, and then in the simulation with the step costs that
the daemon has learned. It runs again, up to `ATTEMPTS_MAX` times, while the figures differ by more
than `TOLERANCE`: other programs change the speed of the daemon in the middle of a trace.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from inferd.testing import running_daemon
from tools.get_models import MODELS_DIR

from .calibration import (
    SLOTS,
    TOLERANCE,
    Arrival,
    NodeCosts,
    Observed,
    measured_sessions,
    observed,
    run_trace,
    simulate,
    synthetic_trace,
)
from .fleets import COSTS_FILE

ATTEMPTS_MAX = 3
CONFIG = f"""
[defaults]
slots = {SLOTS}
ctx-size = 4096
[models.paced]
backend = "echo"
slots = {SLOTS}
[models.paced.echo]
step-ms = 20
"""
PACED, SMOLLM2 = "paced", "smollm2-135m-instruct"
RESULTS = COSTS_FILE.with_name("fleet-calibration.json")


class Comparison(NamedTuple):
    """One trace on both sides."""

    real: Observed
    simulated: Observed
    costs: NodeCosts

    @property
    def worst(self) -> float:
        """The greatest error."""
        return max(map(abs, self.real.errors(self.simulated).values()))


def compare(
    model: str,
    trace: Sequence[Arrival],
    attempts: int = ATTEMPTS_MAX,
    models_dir: Path | None = None,
) -> list[Comparison]:
    """Return the attempts, of which the last one is the best unless none is within tolerance."""
    found: list[Comparison] = []
    with running_daemon(CONFIG, models_dir=models_dir) as daemon:
        while len(found) < attempts:
            records, costs = asyncio.run(
                run_trace(daemon.socket, model, trace, echoes=model == PACED)
            )
            simulated, _ = simulate(measured_sessions(trace, records), costs)
            found.append(Comparison(observed(records), simulated, costs))
            if found[-1].worst <= TOLERANCE:
                break
    return found


def calibrate(models: Sequence[str] = (PACED, SMOLLM2)) -> None:
    """Compare *models*, print a table, and save the step cost of SmolLM2."""
    traces = {
        PACED: synthetic_trace(44, 60, 100),
        SMOLLM2: synthetic_trace(20, 30, 80),
    }
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for model in models:
        trace = traces[model]
        found = compare(model, trace, models_dir=MODELS_DIR)
        for number, attempt in enumerate(found, 1):
            _print(model, number, attempt)
        best = min(found, key=lambda one: one.worst)
        saved[model] = {
            "attempts": len(found),
            "turns": sum(len(arrival.turns) for arrival in trace),
            "between_s": best.costs.between_s,
            "request_s": best.costs.request_s,
            "real": vars(best.real),
            "simulated": vars(best.simulated),
        }
        if model == SMOLLM2:
            known = best.costs.cost.coefficients()
            assert known is not None
            COSTS_FILE.write_text(json.dumps(known._asdict()) + "\n")
    RESULTS.write_text(json.dumps(saved, indent=1) + "\n")


def _print(model: str, number: int, attempt: Comparison) -> None:
    real, there = attempt.real, attempt.simulated
    pairs = {
        "total time": (real.total_s, there.total_s),
        "mean turn": (real.turn_s, there.turn_s),
        "mean wait": (real.wait_s, there.wait_s),
    }
    print(f"{model}, attempt {number}")
    for name, (here, simulated) in pairs.items():
        difference = f"{100 * (simulated / here - 1):+.1f} %"
        print(f"  {name:10}  real {here:8.3f} s  simulated {simulated:8.3f} s  {difference}")

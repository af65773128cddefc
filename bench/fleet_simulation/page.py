"""The results of the simulation: a file, plots, and a table in docs/fleet.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report import rows
from tools.build_engine import ROOT

from . import plots
from .fleets import FLEETS
from .policies import POLICIES

RESULTS = ROOT / "bench" / "results" / "fleet-simulation.json"
PAGE = ROOT / "docs" / "fleet.md"
BARS = ROOT / "docs" / "fleet-simulation.svg"
LINES = ROOT / "docs" / "fleet-simulation-day.svg"
CALIBRATION = RESULTS.with_name("fleet-calibration.json")
_MODELS = {"paced": "echo, 20 ms a step", "smollm2-135m-instruct": "SmolLM2-135M-Instruct"}
_CALIBRATED = ("total_s", "turn_s", "wait_s")
LINES_FLEET = "10 nodes, a day"
SEEDS = range(1, 1 + max(fleet.seeds for fleet in FLEETS.values()))
HEADER = (
    *("policy", "max / mean", "variation", "in 10 min", "prefix hits", "sessions moved"),
    *("urgent p99", "normal p99", "mean turn", "late turns"),
)


def collect(folder: Path) -> None:
    """Write the runs of *folder* to the file of results, in place of older ones."""
    known = {_key(run): run for run in load()}
    for path in folder.glob("*.json"):
        run = json.loads(path.read_text())
        known[_key(run)] = run
    runs = [known[f, p, s] for f in FLEETS for p in POLICIES for s in SEEDS if (f, p, s) in known]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def _key(run: dict[str, Any]) -> tuple[str, str, int]:
    return run["fleet"], run["policy"], run["seed"]


def load() -> list[dict[str, Any]]:
    """Return the runs in the file of results."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def line(run: dict[str, Any]) -> str:
    """Return a line about a run."""
    cells = zip(HEADER[1:], _cells([run])[1:], strict=True)
    shown = "  ".join(f"{name} {value}" for name, value in cells)
    return (
        f"{run['fleet']}, seed {run['seed']}: {run['policy']}: {run['turns']} turns,"
        f" load {run['load']:.2f}, {shown}, {run['cpu_s']:.0f} s of CPU time"
    )


def _cells(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the row of a policy: means, and the range over several seeds."""

    def cell(shown: str, value: Callable[[dict[str, Any]], float], unit: str = "") -> str:
        values = [value(run) for run in runs]
        texts = [shown.format(one).replace(",", " ") for one in (min(values), max(values))]
        mean = shown.format(statistics.fmean(values)).replace(",", " ")
        spread = f" ({texts[0]}–{texts[1]})" if texts[0] != texts[1] else ""
        return f"{mean}{spread}{unit}"

    return [
        runs[0]["policy"],
        cell("{:.2f}", lambda run: run["imbalance_max"]),
        cell("{:.2f}", lambda run: run["imbalance_cv"]),
        cell("{:.2f}", lambda run: run["imbalance_cv_10min"]),
        cell("{:.1f}", lambda run: 100 * run["prefix_hits"], " %"),
        cell("{:,.0f}", lambda run: run["moves"]),
        cell("{:.1f}", lambda run: run["waits"]["urgent"]["p99"], " s"),
        cell("{:.0f}", lambda run: run["waits"]["normal"]["p99"], " s"),
        cell("{:.0f}", lambda run: run["turn_s"], " s"),
        cell("{:,.0f}", lambda run: run["late_turns"]),
    ]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table for each fleet."""
    parts = []
    for fleet in FLEETS:
        found = [run for run in runs if run["fleet"] == fleet]
        if found:
            by_policy = [[run for run in found if run["policy"] == p] for p in POLICIES]
            turns, loads = [[run[key] for run in found] for key in ("turns", "load")]
            spread = f"{min(turns):,} to {max(turns):,} turns".replace(",", " ")
            seeds = f", {FLEETS[fleet].seeds} seeds" if FLEETS[fleet].seeds > 1 else ""
            heading = f"**{fleet}**: {spread}, load {min(loads):.2f} to {max(loads):.2f}{seeds}"
            lines = [_cells(runs) for runs in by_policy if runs]
            parts.append(f"{heading}\n\n{rows(HEADER, lines)}")
    return "\n".join(parts)


def mean_runs(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each fleet and policy the means over the seeds, without windows of time."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["fleet"], run["policy"]), []).append(run)
    return [_mean(same) for same in found.values()]


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _mean([value[key] for value in values]) for key in first if key != "windows"}
    return first if isinstance(first, str) else statistics.fmean(values)


def write() -> None:
    """Write the plots, and the tables of the page."""
    runs = load()
    policies = [name for name in POLICIES if any(run["policy"] == name for run in runs)]
    fleets = [name for name in FLEETS if any(run["fleet"] == name for run in runs)]
    BARS.write_text(plots.bars(mean_runs(runs), policies, fleets))
    first = [run for run in runs if run["seed"] == 1]
    LINES.write_text(plots.lines(first, policies, LINES_FLEET))
    PAGE.write_text(with_figures(PAGE.read_text(), runs))


def with_figures(text: str, runs: Sequence[dict[str, Any]]) -> str:
    """Return the text of the page with the tables of the calibration and of *runs*."""
    calibrated = json.loads(CALIBRATION.read_text())
    text = _replaced(text, "calibration", calibration_table(calibrated))
    return _replaced(text, "simulation", table(runs))


def _replaced(text: str, name: str, content: str) -> str:
    begin, end = (f"<!-- {name}: {place} -->\n" for place in ("begin", "end"))
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{content}{end}{rest.partition(end)[2]}"


def calibration_table(calibrated: Mapping[str, Any]) -> str:
    """Return a table of the traces that ran on a real node and in the simulation."""

    def cell(model: Mapping[str, Any], key: str) -> str:
        real, simulated = model["real"][key], model["simulated"][key]
        return f"{real:.2f} s, {simulated:.2f} s ({100 * (simulated / real - 1):+.1f} %)"

    return rows(
        ("model", "turns", "total time, real and simulated", "mean turn", "mean wait"),
        [
            (_MODELS[name], f"{model['turns']}", *(cell(model, key) for key in _CALIBRATED))
            for name, model in calibrated.items()
        ],
    )

"""The results of the simulation: a file, plots, and a table in docs/fleet.md."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
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
BEGIN, END = "<!-- simulation: begin -->\n", "<!-- simulation: end -->\n"
LINES_FLEET = "10 nodes, a day"
HEADER = (
    *("policy", "max / mean", "variation", "in 10 min", "prefix hits", "sessions moved"),
    *("urgent p99", "normal p50", "normal p99", "mean turn"),
)


def collect(folder: Path) -> None:
    """Write the runs of *folder* to the file of results, in place of older ones."""
    known = {(run["fleet"], run["policy"]): run for run in load()}
    for path in folder.glob("*.json"):
        run = json.loads(path.read_text())
        known[run["fleet"], run["policy"]] = run
    runs = [known[f, p] for f in FLEETS for p in POLICIES if (f, p) in known]
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")


def load() -> list[dict[str, Any]]:
    """Return the runs in the file of results."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def line(run: dict[str, Any]) -> str:
    """Return a line about a run."""
    cells = zip(HEADER[1:], _cells(run)[1:], strict=True)
    shown = "  ".join(f"{name} {value}" for name, value in cells)
    return (
        f"{run['fleet']}: {run['policy']}: {run['turns']} turns, load {run['load']:.2f}, {shown},"
        f" {run['cpu_s']:.0f} s of CPU time"
    )


def _cells(run: dict[str, Any]) -> list[str]:
    waits = run["waits"]
    return [
        run["policy"],
        f"{run['imbalance_max']:.2f}",
        f"{run['imbalance_cv']:.3f}",
        f"{run['imbalance_cv_10min']:.2f}",
        f"{100 * run['prefix_hits']:.1f} %",
        f"{run['moves']:,}".replace(",", " "),
        f"{waits['urgent']['p99']:.2f} s",
        f"{waits['normal']['p50']:.2f} s",
        f"{waits['normal']['p99']:.1f} s",
        f"{run['turn_s']:.1f} s",
    ]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a table for each fleet."""
    parts = []
    for fleet in FLEETS:
        found = [run for run in runs if run["fleet"] == fleet]
        if found:
            turns = f"{found[0]['turns']:,}".replace(",", " ")
            loads = sorted(run["load"] for run in found)
            heading = f"**{fleet}**: {turns} turns, load {loads[0]:.2f} to {loads[-1]:.2f}\n\n"
            parts.append(heading + rows(HEADER, [_cells(run) for run in found]))
    return "\n".join(parts)


def write() -> None:
    """Write the plots, and the tables of the page."""
    runs = load()
    policies = [name for name in POLICIES if any(run["policy"] == name for run in runs)]
    fleets = [name for name in FLEETS if any(run["fleet"] == name for run in runs)]
    BARS.write_text(plots.bars(runs, policies, fleets))
    LINES.write_text(plots.lines(runs, policies, LINES_FLEET))
    text = PAGE.read_text()
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    PAGE.write_text(re.sub(pattern, lambda _: BEGIN + table(runs) + END, text, flags=re.DOTALL))

"""The files of measurements: every run in bench/out, each scenario's last full one in results.

A file of `bench/results/` holds the facts, the figures of every run, and for each side with
a picture the streams of one run. docs/benchmarks.md is generated from these files alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.build_engine import ROOT

from .runs import Run, typical
from .scenarios import Scenario
from .streams import Stream, from_dict

OUT_DIR = ROOT / "bench" / "out"
RESULTS_DIR = ROOT / "bench" / "results"
TIME_DIGITS = 4


@dataclass(frozen=True)
class Result:
    """A scenario's last full run."""

    facts: Mapping[str, str]
    runs: Sequence[Run]
    pictures: Mapping[str, Sequence[Stream]]
    """The streams of one run by side."""
    notes: Sequence[str] = field(default=())
    """Paragraphs for the page, until the next full run."""


def since_begin(streams: Sequence[Stream]) -> list[Stream]:
    """Return the streams in the order of their requests, with rounded times from the first one."""
    begin_s = min(stream.requested_s for stream in streams)

    def moved(time_s: float) -> float:
        return round(time_s - begin_s, TIME_DIGITS)

    return [
        replace(
            stream,
            requested_s=moved(stream.requested_s),
            arrivals_s=tuple(map(moved, stream.arrivals_s)),
            waited_s=round(stream.waited_s, TIME_DIGITS),
        )
        for stream in sorted(streams, key=lambda s: s.requested_s)
    ]


def pictured(scenario: Scenario, runs: Sequence[Run]) -> dict[str, list[Stream]]:
    """Return the streams for the pictures, by side. They are from the run with the median of the
    first figure.
    """
    figure = scenario.figures[0].name
    return {
        side: since_begin(typical(runs, (scenario.picture_case, side), figure).streams)
        for side in scenario.pictures
    }


def save(scenario: Scenario, facts: Mapping[str, str], runs: Sequence[Run]) -> Path:
    """Write every run with all its streams to bench/out and return the file."""
    OUT_DIR.mkdir(parents=True, exist_ok=True)
    path = OUT_DIR / time.strftime(f"{scenario.name}-%Y%m%d-%H%M%S.json")
    every = [
        run.as_dict() | {"streams": [s.as_dict() for s in since_begin(run.streams)]} for run in runs
    ]
    path.write_text(json.dumps({"facts": facts, "runs": every}) + "\n")
    return path


def publish(scenario: Scenario, facts: Mapping[str, str], runs: Sequence[Run]) -> Path:
    """Write the scenario's file of bench/results; return it."""
    RESULTS_DIR.mkdir(exist_ok=True)
    path = RESULTS_DIR / f"{scenario.name}.json"
    result = Result(facts, runs, pictured(scenario, runs))
    path.write_text(dump(result))
    return path


def dump(result: Result) -> str:
    """Return the file's text with one run or stream per line, so that diffs are readable."""
    pictures = {side: _lines([s.as_dict() for s in ss]) for side, ss in result.pictures.items()}
    parts = {
        "facts": json.dumps(dict(result.facts), indent=1),
        "notes": json.dumps(list(result.notes), indent=1),
        "runs": _lines([run.as_dict() for run in result.runs]),
        "pictures": _table(pictures),
    }
    return _table(parts) + "\n"


def _table(parts: Mapping[str, str]) -> str:
    inside = ",\n".join(f"{json.dumps(name)}: {text}" for name, text in parts.items())
    return f"{{\n{inside}\n}}"


def _lines(items: Sequence[Mapping[str, Any]]) -> str:
    return "[\n" + ",\n".join(map(json.dumps, items)) + "\n]"


def load(name: str) -> Result | None:
    """Return the last full run of the scenario *name*, or None."""
    path = RESULTS_DIR / f"{name}.json"
    return parse(path.read_text()) if path.exists() else None


def parse(text: str) -> Result:
    """Parse the output of `dump`."""
    content = json.loads(text)
    return Result(
        facts=content["facts"],
        runs=[Run(**run) for run in content["runs"]],
        pictures={
            side: [from_dict(stream) for stream in streams]
            for side, streams in content["pictures"].items()
        },
        notes=content["notes"],
    )

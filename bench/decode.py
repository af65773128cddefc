"""The comparison: every side in turn, round after round, at each number of streams."""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.build_engine import ROOT

from .resting import ForeignLoad, calm
from .scenario import FIGURES, N_PREDICT, Job, Run, Stream, figures, medians

OUT_DIR = ROOT / "bench" / "out"
WARM_UP_TOKENS = 16
ATTEMPTS_MAX = 4
FOREIGN_CORES_MAX = 0.05

Side = Callable[[Job], Awaitable[list[Stream]]]
"""Runs a job and returns its streams."""

_serials = itertools.count(1)


async def warm_up(sides: dict[str, Side], streams: Sequence[int]) -> None:
    """Run each side once, uncounted; round 0 is nobody's."""
    for side in sides.values():
        await side(Job(max(streams), 0, next(_serials), WARM_UP_TOKENS))


async def compare(
    sides: dict[str, Side], streams: Sequence[int], rounds: int, console: Console
) -> list[Run]:
    """Run all rounds; within each the sides alternate, and another one begins each time."""
    runs: list[Run] = []
    names = list(sides)
    for number in range(1, rounds + 1):
        for count in streams:
            begin = number % len(names)
            for name in names[begin:] + names[:begin]:
                runs.append(await undisturbed(sides[name], name, count, number))
                console.print(progress_line(runs[-1], rounds), soft_wrap=True)
    return sorted(runs, key=lambda run: names.index(run.side))


async def undisturbed(side: Side, name: str, streams: int, number: int) -> Run:
    """Run one side; again, a few times, if others kept the machine busy; return the calmest."""
    calmest: Run | None = None
    for _ in range(ATTEMPTS_MAX):
        await calm(FOREIGN_CORES_MAX)
        load = ForeignLoad()
        job = Job(streams, number, next(_serials))
        run = check(figures(name, job, await side(job)))
        run = replace(run, foreign_cores=load.cores())
        if calmest is None or run.foreign_cores < calmest.foreign_cores:
            calmest = run
        if calmest.foreign_cores <= FOREIGN_CORES_MAX:
            break
    assert calmest is not None
    return calmest


def check(run: Run) -> Run:
    """Refuse a run in which a stream ended early: its figures would compare with nothing."""
    expected = run.streams * N_PREDICT
    assert run.tokens == expected, f"{run.side}: {run.tokens} tokens, not {expected}"
    return run


def progress_line(run: Run, rounds: int) -> str:
    """Return what is shown after a run."""
    rate = f"{run.tokens_per_s:6.1f} tok/s"
    noise = f"  ({run.foreign_cores:.1f} cores busy with others)" * (
        run.foreign_cores > FOREIGN_CORES_MAX
    )
    return f"round {run.round}/{rounds}  {run.streams:2} streams  {run.side:15} {rate}{noise}"


def table(runs: Sequence[Run]) -> Table:
    """Return the medians as a table for the terminal."""
    view = Table(title=f"medians of {max(r.round for r in runs)} alternating rounds")
    view.add_column("streams", justify="right")
    view.add_column("side")
    for name in FIGURES:
        view.add_column(name, justify="right")
    by_key = medians(runs)
    for count in sorted({run.streams for run in runs}):
        for (side, streams), row in by_key.items():
            if streams == count:
                view.add_row(str(count), side, *(f"{row[name]:.1f}" for name in FIGURES))
        view.add_section()
    return view


def save(runs: Sequence[Run], facts: dict[str, Any]) -> Path:
    """Write everything measured as JSON; return the file."""
    OUT_DIR.mkdir(parents=True, exist_ok=True)
    path = OUT_DIR / time.strftime("decode-%Y%m%d-%H%M%S.json")
    content = {"facts": facts, "runs": [run.as_dict() for run in runs]}
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def machine() -> dict[str, str]:
    """Return what the figures depend on: processor, cores, system, Python, date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": models[0] if models else platform.machine(),
        "cores": str(len(models) or 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }

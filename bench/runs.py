"""Runs of a scenario: their figures, the medians over rounds, and the targets; pure functions."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .streams import Stream

Key = tuple[int, str]
"""(case, side)"""


@dataclass(frozen=True)
class Figure:
    """One number of a run. Its median over the rounds counts, or its largest value if a bound must
    hold in each round.

    A "worst" figure is the worst within a run; over the rounds it has a median like the others.
    """

    name: str
    heading: str
    digits: int = 2
    over: Literal["median", "max"] = "median"


@dataclass(frozen=True)
class Target:
    """A figure of one side, or its ratio to another side's figure, with the bound to reach."""

    figure: str
    side: str
    other: str = ""
    """The other side of a ratio, which is *side* / *other*."""
    least: float | None = None
    most: float | None = None
    case: int = 0

    def met(self, value: float) -> bool:
        """Return whether *value* reaches the target."""
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)

    def bound(self) -> str:
        """Return the bound as text."""
        bounds = {"≥": self.least, "≤": self.most}
        return " ".join(f"{sign} {value:g}" for sign, value in bounds.items() if value is not None)


@dataclass(frozen=True)
class Run:
    """One side in one round of one case."""

    side: str
    case: int
    round: int
    figures: dict[str, float]
    external_cores: float = 0.0
    """Average number of cores that other processes kept busy during the run."""
    streams: tuple[Stream, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, without the streams."""
        fields = ("side", "case", "round", "figures", "external_cores")
        return {name: getattr(self, name) for name in fields}


def keys(runs: Sequence[Run]) -> list[Key]:
    """Return (case, side) of the runs: cases ascending, sides in order of appearance."""
    return sorted(dict.fromkeys((run.case, run.side) for run in runs), key=operator.itemgetter(0))


def over_rounds(runs: Sequence[Run], figures: Sequence[Figure]) -> dict[Key, dict[str, float]]:
    """Return the value of each figure over the rounds."""
    return {
        key: {figure.name: _over([r for r in runs if (r.case, r.side) == key], figure)
              for figure in figures}
        for key in keys(runs)
    }  # fmt: skip


def _over(runs: Sequence[Run], figure: Figure) -> float:
    values = [run.figures[figure.name] for run in runs]
    return max(values) if figure.over == "max" else statistics.median(values)


def reached(counted: dict[Key, dict[str, float]], target: Target) -> float | None:
    """Return the measured value of *target*; None if one of its sides did not run."""
    if (target.case, target.side) not in counted:
        return None
    value = counted[target.case, target.side][target.figure]
    if not target.other:
        return value
    if (target.case, target.other) not in counted:
        return None
    other = counted[target.case, target.other][target.figure]
    return value / other if other else None


def typical(runs: Sequence[Run], key: Key, figure: str) -> Run:
    """Return the run of *key* with the median of *figure*, or the nearest above."""
    ordered = sorted(
        (run for run in runs if (run.case, run.side) == key), key=lambda r: r.figures[figure]
    )
    return ordered[len(ordered) // 2]

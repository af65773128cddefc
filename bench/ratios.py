"""The picture of inferd's ratios to llama-server, docs/ratios.svg, made from bench/results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tools.build_engine import ROOT

from .result_files import load
from .runs import over_rounds
from .scenarios import SCENARIOS
from .timeline import style

FILE = ROOT / "docs" / "ratios.svg"
WIDTH, LABELS, LANE, HEAD, FOOT = 900, 400, 30, 34, 30
RATIO_MIN, RATIO_MAX = 0.5, 200.0
MARKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200)


@dataclass(frozen=True)
class Comparison:
    """A figure of a scenario. *more* means that the larger value is better."""

    label: str
    scenario: str
    figure: str
    unit: str
    case: int = 0
    side: str = "inferd"
    more: bool = False


COMPARISONS = (
    Comparison(
        "urgent request beside long ones: first token", "urgent", "urgent_ttft_worst_s", "s"
    ),
    Comparison("longest stall of streams beside a long prompt", "long-prompt", "gap_worst_s", "s"),
    Comparison("session continued after a restart: first token", "return", "ttft_s", "s"),
    Comparison("programs with one long prefix: all done", "prefix", "makespan_s", "s"),
    Comparison("16 streams", "decode", "tokens_per_s", "tokens/s", 16, "inferd stream", more=True),
    Comparison("100 sessions of three turns: all done", "sessions", "makespan_s", "s"),
    Comparison("one stream", "decode", "tokens_per_s", "tokens/s", 1, "inferd stream", more=True),
    Comparison("the long prompt itself: first token", "long-prompt", "long_ttft_s", "s"),
)


@dataclass(frozen=True)
class Bar:
    """A comparison with its measured values."""

    comparison: Comparison
    inferd: float
    llama_server: float

    @property
    def ratio(self) -> float:
        """The factor by which inferd is better; below 1 it is worse."""
        return (
            self.inferd / self.llama_server
            if self.comparison.more
            else self.llama_server / self.inferd
        )


def measured() -> list[Bar]:
    """Return the comparisons that have results, with the medians over all rounds."""
    bars = []
    for comparison in COMPARISONS:
        result = load(comparison.scenario)
        if result is None:
            continue
        counted = over_rounds(result.runs, SCENARIOS[comparison.scenario].figures)
        inferd = counted[comparison.case, comparison.side][comparison.figure]
        llama_server = counted[comparison.case, "llama-server"][comparison.figure]
        bars.append(Bar(comparison, inferd, llama_server))
    return bars


def x_of(ratio: float) -> float:
    """Return the place of *ratio* on the logarithmic axis."""
    share = math.log(ratio / RATIO_MIN) / math.log(RATIO_MAX / RATIO_MIN)
    return LABELS + share * (WIDTH - LABELS - 60)


def draw(bars: Sequence[Bar]) -> str:
    """Return an SVG with one bar for each comparison."""
    bottom = HEAD + len(bars) * LANE
    height = bottom + FOOT
    parts = ['<text class="ink title" x="12" y="20">inferd against llama-server, same work</text>']
    for mark in MARKS:
        x = x_of(mark)
        parts.append(f'<path class="grid" d="M{x:.1f} {HEAD}V{bottom + 4}"/>')
        parts.append(f'<text class="ink axis" x="{x:.1f}" y="{bottom + 18}">{mark:g}×</text>')
    for number, bar in enumerate(bars):
        y = HEAD + number * LANE + 4
        left, right = sorted((x_of(1), x_of(bar.ratio)))
        paint = "decoding" if bar.ratio >= 1 else "standing"
        width = right - left
        values = f"{bar.llama_server:.3g} → {bar.inferd:.3g} {bar.comparison.unit}"
        parts += [
            f'<text class="ink" x="12" y="{y + 10}">{escape(bar.comparison.label)}</text>',
            f'<text class="ink" x="12" y="{y + 22}" opacity="0.7">{escape(values)}</text>',
            f'<rect class="{paint}" x="{left:.1f}" y="{y}" width="{width:.1f}" height="18"/>',
            f'<text class="ink" x="{right + 6:.1f}" y="{y + 13}">{bar.ratio:.3g}×</text>',
        ]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{style()}</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


def write() -> None:
    """Write the picture."""
    FILE.write_text(draw(measured()))


if __name__ == "__main__":
    write()

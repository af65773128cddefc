"""The plots of the simulation as SVG: bars for each figure, and lines over a day."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from bench.timeline import style

WIDTH, LABELS, MARGIN = 1100, 190, 12
COLOURS = (
    ("#1f6feb", "#58a6ff"),
    ("#2da44e", "#3fb950"),
    ("#bf8700", "#d29922"),
    ("#8250df", "#a371f7"),
    ("#cf222e", "#f85149"),
)
"""The colours of each policy, on a light page and on a dark one."""
BAR, GROUP_GAP, HEAD = 13, 16, 34

Run = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure of a run. Its axis begins at 0, or is logarithmic and begins at *log_min*."""

    title: str
    value: Callable[[Run], float]
    shown: str = "{:.2f}"
    log_min: float = 0.0


FIGURES = (
    Figure("imbalance: variation of nodes' busy time in 10 min", lambda r: r["imbalance_cv_10min"]),
    Figure("prefix hits: share of prompt tokens", lambda r: r["prefix_hits"]),
    Figure("urgent wait, p99, seconds (log)", lambda r: r["waits"]["urgent"]["p99"], log_min=0.1),
    Figure("normal wait, p99, seconds (log)", lambda r: r["waits"]["normal"]["p99"], log_min=0.1),
    Figure("mean turn, seconds (log)", lambda r: r["turn_s"], "{:.0f}", log_min=50.0),
)


def _svg(height: int, parts: Sequence[str]) -> str:
    light = [f".p{at} {{ fill: {pair[0]} }}" for at, pair in enumerate(COLOURS)]
    light += [f".l{at} {{ stroke: {pair[0]}; fill: none }}" for at, pair in enumerate(COLOURS)]
    dark = [f".p{at} {{ fill: {pair[1]} }}" for at, pair in enumerate(COLOURS)]
    dark += [f".l{at} {{ stroke: {pair[1]}; fill: none }}" for at, pair in enumerate(COLOURS)]
    sheet = "\n".join([*light, "@media (prefers-color-scheme: dark) {", *dark, "}"])
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{style()}{sheet}\n</style>\n'
        f'<rect class="page" width="{WIDTH}" height="{height}"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, kind: str = "ink") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def bars(runs: Sequence[Run], policies: Sequence[str], fleets: Sequence[str]) -> str:
    """Return bars for each figure, fleet and policy."""
    by_key = {(run["fleet"], run["policy"]): run for run in runs}
    parts, y = legend(policies), HEAD + 8
    column = (WIDTH - LABELS - MARGIN) / len(fleets)
    for at, fleet in enumerate(fleets):
        for part, line in enumerate(_lines_of(fleet, 18)):
            parts.append(_text(LABELS + at * column, y + 8 + 14 * part, line, "ink title"))
    y += 34
    for figure in FIGURES:
        values = {key: figure.value(run) for key, run in by_key.items()}
        greatest = max(values.values(), default=1.0) or 1.0
        for part, line in enumerate(_lines_of(figure.title, 26)):
            parts.append(_text(MARGIN, y + 14 + 14 * part, line))
        for at, fleet in enumerate(fleets):
            for number, policy in enumerate(policies):
                value = values.get((fleet, policy))
                if value is None:
                    continue
                left, top = LABELS + at * column, y + number * BAR
                width = _share(value, greatest, figure.log_min) * (column - 70)
                parts.append(
                    f'<rect class="p{number}" x="{left:.1f}" y="{top}" width="{width:.1f}"'
                    f' height="{BAR - 3}"/>'
                )
                parts.append(_text(left + width + 4, top + 10, figure.shown.format(value)))
        y += len(policies) * BAR + GROUP_GAP
    return _svg(y, parts)


def _lines_of(title: str, most: int) -> list[str]:
    """Return a title in lines of at most *most* characters."""
    lines = [""]
    for word in title.split():
        if len(lines[-1]) + len(word) >= most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _share(value: float, greatest: float, log_min: float) -> float:
    if not log_min:
        return value / greatest
    if value <= log_min or greatest <= log_min:
        return 0.0
    return math.log(value / log_min) / math.log(greatest / log_min)


def legend(policies: Sequence[str]) -> list[str]:
    """Return the names of the policies with their colours."""
    parts, x = [], float(MARGIN)
    for number, policy in enumerate(policies):
        parts.append(f'<rect class="p{number}" x="{x:.1f}" y="12" width="12" height="12"/>')
        parts.append(_text(x + 17, 22, policy))
        x += 30 + 7 * len(policy)
    return parts


def lines(runs: Sequence[Run], policies: Sequence[str], fleet: str) -> str:
    """Return the load of a fleet and the variation of its nodes over the time."""
    by_policy = {run["policy"]: run for run in runs if run["fleet"] == fleet}
    parts = legend(policies)
    panels = (("load: busy slots of a node, by 4", "load"), ("variation between nodes", "cv"))
    top, height = HEAD + 22, 150
    for title, key in panels:
        series = {p: [w[key] for w in run["windows"]] for p, run in by_policy.items()}
        greatest = max((max(values) for values in series.values()), default=1.0) or 1.0
        parts.append(_text(MARGIN, top - 6, f"{title} ({fleet})"))
        parts += _axes(top, height, greatest)
        for number, policy in enumerate(policies):
            if policy in series:
                parts.append(_path(series[policy], number, top, height, greatest))
        top += height + 48
    return _svg(top - 14, parts)


PLOT_LEFT = 50


def _axes(top: int, height: int, greatest: float) -> list[str]:
    right, parts = WIDTH - MARGIN, []
    for share in (0.0, 0.5, 1.0):
        y = top + height * (1 - share)
        parts.append(f'<path class="grid" d="M{PLOT_LEFT} {y:.1f}H{right}"/>')
        parts.append(_text(PLOT_LEFT - 6, y + 4, f"{greatest * share:.2f}", "ink end"))
    for hour in range(0, 25, 4):
        x = PLOT_LEFT + (right - PLOT_LEFT) * hour / 24
        parts.append(_text(x, top + height + 16, f"{hour}:00", "ink axis"))
    return parts


def _path(values: Sequence[float], number: int, top: int, height: int, greatest: float) -> str:
    step = (WIDTH - MARGIN - PLOT_LEFT) / max(1, len(values) - 1)
    points = " ".join(
        f"{PLOT_LEFT + at * step:.1f},{top + height * (1 - value / greatest):.1f}"
        for at, value in enumerate(values)
    )
    return f'<polyline class="l{number}" stroke-width="1.3" points="{points}"/>'

"""The animated SVG of a terminal recording: frames in a strip, which CSS moves; no script.

A row of text that several frames show is one definition.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import groupby

from pyte.screens import Char

from .terminal import COLUMNS, LINES, Output, Screen, Stream

FRAME_S = 0.2
"""The shortest time of a frame; outputs in between are in the next one."""
END_S = 4.0
CELL_WIDTH, CELL_HEIGHT, PADDING = 8.4, 18, 12
BACKGROUND, FOREGROUND = "#16181d", "#d8dce4"
COLORS = {
    "black": "#3b4048", "red": "#f07178", "green": "#a6d189", "brown": "#e5c07b",
    "blue": "#7aa2f7", "magenta": "#c792ea", "cyan": "#7fd7e0", "white": "#d8dce4",
    "brightblack": "#7f8692", "brightred": "#ff8f95", "brightgreen": "#c0e8a6",
    "brightbrown": "#f4d8a0", "brightblue": "#9dbcff", "brightmagenta": "#dab0f5",
    "brightcyan": "#a5ebf2", "brightwhite": "#ffffff",
}  # fmt: skip
Row = tuple[tuple[int, str, str, str, bool], ...]
"""Runs of a row: column, text, foreground, background, and whether it is bold."""


def _color(name: str, default: str) -> str:
    if name == "default":
        return default
    return COLORS.get(name.replace("bright_", "bright"), f"#{name}" if len(name) == 6 else default)


def _style(cell: Char) -> tuple[str, str, bool]:
    ink, paper = _color(cell.fg, FOREGROUND), _color(cell.bg, BACKGROUND)
    return (paper, ink, cell.bold) if cell.reverse else (ink, paper, cell.bold)


def row_of(cells: Sequence[Char]) -> Row:
    """Return a row's runs of one style; blank ones on the background are left out."""
    runs = []
    for (ink, paper, bold), group in groupby(enumerate(cells), key=lambda pair: _style(pair[1])):
        numbered = list(group)
        text = "".join(cell.data for _, cell in numbered)
        if text.strip() or paper != BACKGROUND:
            runs.append((numbered[0][0], text, ink, paper, bold))
    return tuple(runs)


def frames(outputs: Sequence[Output]) -> Iterator[tuple[float, list[Row]]]:
    """Yield the times of changed screens, and their rows."""
    screen = Screen(COLUMNS, LINES)
    stream = Stream(screen)
    shown: list[Row] | None = None
    for number, output in enumerate(outputs):
        stream.feed(output.text)
        following = outputs[number + 1].at_s if number + 1 < len(outputs) else float("inf")
        if following // FRAME_S == output.at_s // FRAME_S:
            continue
        rows = [row_of([screen.buffer[y][x] for x in range(COLUMNS)]) for y in range(LINES)]
        if rows != shown:
            shown = rows
            yield output.at_s, rows


def svg_of(shown: Sequence[tuple[float, list[Row]]], title: str) -> str:
    """Return the animated picture of the frames *shown*."""
    ends_s = shown[-1][0] + END_S
    width, height = COLUMNS * CELL_WIDTH + 2 * PADDING, LINES * CELL_HEIGHT + 2 * PADDING
    names: dict[Row, str] = {}
    parts = []
    for number, (_, rows) in enumerate(shown):
        uses = [
            f'<use href="#{names.setdefault(row, f"r{len(names)}")}" y="{y * CELL_HEIGHT}"/>'
            for y, row in enumerate(rows)
            if row
        ]
        parts.append(f'<g transform="translate({number * width:g})">{"".join(uses)}</g>')
    steps = "".join(
        f"{100 * at_s / ends_s:.3f}%{{transform:translateX({-number * width:g}px)}}"
        for number, (at_s, _) in enumerate(shown)
    )
    last = f"100%{{transform:translateX({-(len(shown) - 1) * width:g}px)}}"
    definitions = "".join(_definition(name, row) for row, name in names.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        f' width="{width:g}" height="{height:g}" role="img" aria-label="{html.escape(title)}">'
        f"<title>{html.escape(title)}</title>"
        "<style>text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "white-space:pre}.b{font-weight:bold}"
        f"@keyframes play{{{steps}{last}}}"
        f".strip{{animation:play {ends_s:.2f}s steps(1,end) infinite}}</style>"
        f"<defs>{definitions}</defs>"
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>'
        f'<svg x="{PADDING}" y="{PADDING}" width="{COLUMNS * CELL_WIDTH:g}"'
        f' height="{LINES * CELL_HEIGHT}"><g class="strip">{"".join(parts)}</g></svg></svg>\n'
    )


def _definition(name: str, row: Row) -> str:
    runs = []
    for column, text, ink, paper, bold in row:
        x, length = column * CELL_WIDTH, len(text) * CELL_WIDTH
        if paper != BACKGROUND:
            runs.append(
                f'<rect x="{x:g}" width="{length:g}" height="{CELL_HEIGHT}" fill="{paper}"/>'
            )
        if stripped := text.rstrip():
            length = len(stripped) * CELL_WIDTH
            style = f' fill="{ink}"' + ' class="b"' * bold
            runs.append(
                f'<text x="{x:g}" y="14" textLength="{length:g}" lengthAdjust="spacingAndGlyphs"'
                f"{style}>{html.escape(stripped, quote=False)}</text>"
            )
    return f'<g id="{name}">{"".join(runs)}</g>'

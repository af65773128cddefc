"""The recording in asciinema's format, version 2: the rows of each frame that have changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from .picture import BACKGROUND, FOREGROUND, Row
from .terminal import COLUMNS, LINES

Frame = tuple[float, list[Row]]


def cast_of(frames: Sequence[Frame], title: str) -> str:
    """Return the recording as lines of JSON."""
    lines: list[object] = [{"version": 2, "width": COLUMNS, "height": LINES, "title": title}]
    before: list[Row] = [()] * LINES
    for at_s, rows in frames:
        changed = [n for n in range(LINES) if rows[n] != before[n]]
        text = "".join(_redrawn(number + 1, rows[number]) for number in changed)
        lines.append([at_s, "o", f"\x1b[?25l{text}"])
        before = rows
    return "".join(f"{msgspec.json.encode(line).decode()}\n" for line in lines)


def _redrawn(line: int, row: Row) -> str:
    runs = [
        f"\x1b[{line};{column + 1}H\x1b[0{_colors(ink, paper)}{';1' * bold}m{text}"
        for column, text, ink, paper, bold in row
    ]
    return f"\x1b[{line}H\x1b[0m\x1b[2K" + "".join(runs)


def _colors(ink: str, paper: str) -> str:
    return _color(38, ink) * (ink != FOREGROUND) + _color(48, paper) * (paper != BACKGROUND)


def _color(code: int, color: str) -> str:
    red, green, blue = bytes.fromhex(color[1:])
    return f";{code};2;{red};{green};{blue}"

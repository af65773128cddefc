"""The drawing of a run as an SVG: a lane for each program, time from left to right.

`python -m bench.timeline` redraws docs/timelines from bench/results. A lane shows where its
request waited, where its prompt was computed, each token as a tick, and where it paused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from tools.build_engine import ROOT

from . import result_files
from .scenarios import SCENARIOS
from .streams import Stream, by_label

FOLDER = ROOT / "docs" / "timelines"
WIDTH, MARGIN, LABELS, HEAD, FOOT = 900, 12, 130, 52, 30
LANE_TALL, LANE_LOW, LANES_TALL_MAX = 16, 6, 40
STANDS_S = 0.25
"""Minimum gap between two tokens that is drawn as a pause."""
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
LEGEND = ("waiting", "prefill", "decoding", "standing still")
PAINTS = {
    "page": ("fill", "#ffffff", "#0d1117"),
    "grid": ("stroke", "#d8dee4", "#2a313c"),
    "tick": ("stroke", "#0a3069", "#dbeaff"),
    "waiting": ("fill", "#d0d7de", "#3d444d"),
    "prefill": ("fill", "#e8a33d", "#b5751a"),
    "decoding": ("fill", "#8cbcf2", "#2f6fb8"),
    "standing": ("fill", "#f3b8b3", "#7d3c3a"),
    "ink": ("fill", "#24292f", "#d1d7e0"),
    "urgent": ("fill", "#b3261e", "#ff938a"),
}
"""Style of each element: property, colour on a light page, colour on a dark page."""
FONTS = """\
text { font: 12px system-ui, sans-serif } .title { font-size: 15px; font-weight: 600 }
.end { text-anchor: end } .axis { text-anchor: middle } .urgent { font-weight: 600 }
"""

Span = tuple[str, float, float]
"""(kind, from, to)"""


def spans(stream: Stream) -> Iterator[Span]:
    """Yield the phases of a request, from its start to its last token."""
    if not stream.arrivals_s:
        yield "waiting", stream.requested_s, stream.requested_s
        return
    begun_s = min(stream.requested_s + stream.waited_s, stream.first_s)
    yield "waiting", stream.requested_s, begun_s
    yield "prefill", begun_s, stream.first_s
    begin_s = stream.first_s
    for before_s, after_s in stream.gaps():
        if after_s - before_s >= STANDS_S:
            yield "decoding", begin_s, before_s
            yield "standing", before_s, after_s
            begin_s = after_s
    yield "decoding", begin_s, stream.ended_s


def tick_step_s(span_s: float, ticks_max: int = 12) -> float:
    """Return the distance of the time axis's marks."""
    return next((step for step in TICKS if span_s / step <= ticks_max), span_s)


def style() -> str:
    """Return the style sheet: fonts, and colours for a light and for a dark page.

    It uses no variables, because not every SVG viewer supports them.
    """
    light = [f".{name} {{ {what}: {colour} }}" for name, (what, colour, _) in PAINTS.items()]
    dark = [f".{name} {{ {what}: {colour} }}" for name, (what, _, colour) in PAINTS.items()]
    parts = [*light, "@media (prefers-color-scheme: dark) {", *dark, "}"]
    return FONTS + "\n".join(parts) + "\n"


class Picture:
    """An SVG under construction; *span_s* is the time that its width shows."""

    def __init__(self, lanes: int, span_s: float):
        self.lane = LANE_TALL if lanes <= LANES_TALL_MAX else LANE_LOW
        self.labelled = lanes <= LANES_TALL_MAX
        self.left = MARGIN + (LABELS if self.labelled else 0)
        self.scale = (WIDTH - self.left - MARGIN) / span_s
        self.span_s = span_s
        self.bottom = HEAD + lanes * self.lane
        self.height = self.bottom + FOOT
        self.parts: list[str] = []

    def x(self, time_s: float) -> float:
        """Return the position of *time_s*."""
        return self.left + time_s * self.scale

    def add(self, tag: str, kind: str, text: str = "", **attributes: float) -> None:
        """Add an element."""
        values = " ".join(f'{key}="{value:.6g}"' for key, value in attributes.items())
        end = f">{escape(text)}</{tag}>" if text else "/>"
        self.parts.append(f'<{tag} class="{kind}" {values}{end}')

    def head(self, title: str) -> None:
        """Draw the title and the legend."""
        self.add("text", "ink title", title, x=MARGIN, y=20)
        x = float(MARGIN)
        for name in LEGEND:
            self.add("rect", name.split()[0], x=x, y=30, width=12, height=12)
            self.add("text", "ink", name, x=x + 17, y=40)
            x += 40 + 7 * len(name)
        self.parts.append(f'<path class="tick" d="M{x + 6:.6g} 30v12"/>')
        self.add("text", "ink", "a token", x=x + 17, y=40)

    def axis(self) -> None:
        """Draw the time axis."""
        step_s = tick_step_s(self.span_s)
        for number in range(int(self.span_s / step_s + 1e-6) + 1):
            x = self.x(number * step_s)
            self.parts.append(f'<path class="grid" d="M{x:.6g} {HEAD}V{self.bottom + 4}"/>')
            self.add("text", "ink axis", f"{number * step_s:g} s", x=x, y=self.bottom + 18)

    def draw(self, number: int, label: str, streams: Iterable[Stream]) -> None:
        """Draw the lane of one program."""
        y = HEAD + number * self.lane
        height = self.lane - (3 if self.labelled else 1)
        for stream in streams:
            for kind, begin_s, end_s in spans(stream):
                width = (end_s - begin_s) * self.scale
                if width > 0:
                    self.add("rect", kind, x=self.x(begin_s), y=y, width=width, height=height)
            self.ticks(stream, y, height)
            if self.labelled:
                kind = "urgent end" if stream.priority == "urgent" else "ink end"
                self.add("text", kind, label, x=self.left - 6, y=y + 11)
                label = ""

    def ticks(self, stream: Stream, y: float, height: float) -> None:
        """Draw a tick for each token, at most one per pixel."""
        pixels = dict.fromkeys(round(self.x(time_s), 0) for time_s in stream.arrivals_s)
        path = "".join(f"M{x:.6g} {y:.6g}v{height:.6g}" for x in pixels)
        if path:
            self.parts.append(f'<path class="tick" d="{path}" stroke-width="0.6"/>')

    def svg(self) -> str:
        """Return the whole file."""
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{style()}</style>\n'
            f'<rect class="page" width="{WIDTH}" height="{self.height}"/>\n{body}\n</svg>\n'
        )


def draw(title: str, streams: Sequence[Stream], span_s: float | None = None) -> str:
    """Return an SVG of *streams*, whose times begin at 0; *span_s* is the time that it shows."""
    lanes = by_label(streams)
    picture = Picture(len(lanes), span_s or max(s.ended_s for s in streams) or 1.0)
    picture.head(title)
    picture.axis()
    for number, (label, turns) in enumerate(lanes.items()):
        picture.draw(number, label, turns)
    return picture.svg()


def file_of(scenario: str, side: str) -> Path:
    """Return the path of a side's picture."""
    return FOLDER / f"{scenario}-{side.replace(', ', '-').replace(' ', '-')}.svg"


def write(scenario: str, title: str, pictures: Mapping[str, Sequence[Stream]]) -> None:
    """Draw the sides of a scenario with the same time scale."""
    FOLDER.mkdir(exist_ok=True)
    span_s = max((s.ended_s for streams in pictures.values() for s in streams), default=1.0)
    for side, streams in pictures.items():
        file_of(scenario, side).write_text(draw(f"{title}: {side}", streams, span_s))


def main() -> None:
    """Redraw all pictures."""
    for scenario in SCENARIOS.values():
        if result := result_files.load(scenario.name):
            write(scenario.name, scenario.title, result.pictures)


if __name__ == "__main__":
    main()

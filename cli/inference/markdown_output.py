"""The output of an answer on a terminal, with its Markdown rendered as it arrives.

Finished blocks (paragraphs, lists, code) are printed once. Only the last block, which can still
change, is drawn again: by rich's `Live`, at most as high as the terminal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment, SegmentLines

from ..output import without_controls, write_answer, write_dimmed

REFRESHES_PER_S = 10
BUSY_RATIO_MAX = 0.2
"""The share of time that parsing, or rendering, the last block may take; both take longer, and so
are done less often, for a long one.
"""
_BLOCKS = MarkdownIt().enable(["table", "strikethrough"])
_BLOCKS.core.ruler.disable("inline")
_Lines = list[list[Segment]]


def split_blocks(text: str) -> tuple[list[str], str]:
    """Return the blocks of a growing Markdown text that more text cannot change, and the rest."""
    *lines, last = text.split("\n")
    # The beginning of a line may look like another block, such as "```" in "```code```", or "2" in
    # "2. the next item"; not a letter after a blank line.
    begins_text = last[:1].isalpha() and bool(lines) and not lines[-1].strip()
    known = text if begins_text else "\n".join(lines)
    starts = [
        token.map[0]
        for token in _BLOCKS.parse(known)
        if token.level == 0 and token.nesting >= 0 and token.map is not None
    ]
    if len(starts) < 2:
        return [], text
    lines.append(last)
    blocks = ["\n".join(lines[start:end]).strip("\n") for start, end in pairwise(starts)]
    return blocks, "\n".join(lines[starts[-1] :])


class _LeftHeading(Heading):
    """A heading at the left edge, like the text that it belongs to."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": _LeftHeading}


class MarkdownOutput:
    """An answer whose Markdown is rendered; its interface is that of `AnswerOutput`."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False)
        self._rest = ""
        self._printed = False
        self._live: Live | None = None
        self._rendered, self._rendered_lines = "", [[Segment("")]]
        self._next_render_at = self._next_split_at = 0.0

    def write_reasoning(self, text: str) -> None:
        """Write reasoning, which does not belong to the answer."""
        if text:
            self._print_rest()
        write_dimmed(text)

    def write_text(self, text: str) -> None:
        """Write a piece of the answer."""
        if not text:
            return
        begins_line = self._rest.endswith("\n")
        self._rest += without_controls(text)
        if (begins_line or "\n" in text) and time.monotonic() >= self._next_split_at:
            self._print_blocks()
        if self._live is None and self._rest.strip():
            self._start_live()

    def _print_blocks(self) -> None:
        """Print the finished blocks."""
        now = time.monotonic()
        blocks, self._rest = split_blocks(self._rest)
        self._next_split_at = now + (time.monotonic() - now) / BUSY_RATIO_MAX
        for block in blocks:
            self._print(block)

    def _start_live(self) -> None:
        self._live = Live(
            get_renderable=self._tail,
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start(refresh=True)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Remove the last block while messages are printed."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        elif sys.stderr.isatty():
            self._console.line()
        try:
            yield
        finally:
            if live is not None:  # another one, as it would erase the lines above it again
                self._start_live()

    def end(self, tool_calls: Sequence[str]) -> None:
        """End the answer, and write its tool calls after it."""
        self._print_rest()
        if not self._printed and not tool_calls:
            self._console.line()
        for call in tool_calls:
            write_answer(call)

    def _print_rest(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._print_blocks()
        rest, self._rest = self._rest, ""
        if rest.strip():
            self._print(rest)

    def _print(self, block: str) -> None:
        lines = self._render(block)
        # The lines between blocks belong to the later one, so that none ends an answer.
        self._console.print(SegmentLines([[], *lines] if self._printed else lines, new_lines=True))
        self._printed = True

    def _tail(self) -> SegmentLines:
        """Return the end of the last block, as much as the terminal shows."""
        now, rest = time.monotonic(), self._rest
        if rest != self._rendered and now >= self._next_render_at:
            self._rendered, self._rendered_lines = rest, self._render(rest)
            self._next_render_at = now + (time.monotonic() - now) / BUSY_RATIO_MAX
        lines = [[], *self._rendered_lines] if self._printed else self._rendered_lines
        return SegmentLines(lines[-max(1, self._console.height - 1) :], new_lines=True)

    def _render(self, text: str) -> _Lines:
        """Return *text* as lines, without control characters that an entity may have spelled."""
        markdown = _Markdown(text, code_theme="ansi_dark", hyperlinks=False)
        lines = self._console.render_lines(markdown, pad=False)
        return _without_blank_ends([_without_padding(_printable(line)) for line in lines])


def _printable(line: list[Segment]) -> list[Segment]:
    return [Segment(without_controls(segment.text), segment.style) for segment in line]


def _without_padding(line: list[Segment]) -> list[Segment]:
    """Return a line without the spaces at its end, which would be copied, or wrapped after a
    change of the terminal's width.
    """
    while line and not (line[-1].style and line[-1].style.bgcolor):
        *line, last = line
        if text := last.text.rstrip():
            return [*line, Segment(text, last.style)]
    return line


def _without_blank_ends(lines: _Lines) -> _Lines:
    shown = [n for n, line in enumerate(lines) if line]
    return lines[shown[0] : shown[-1] + 1] if shown else []

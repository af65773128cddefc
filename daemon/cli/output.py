"""Output of commands: sentences, tables, JSON, and on a terminal colors and progress bars."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import typer

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Fraction = Callable[[float], None]
Bytes = Callable[[str, int, int | None], None]

_CONTROLS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\t\n"}


def write(text: str, end: str = "\n") -> None:
    """Write to standard output and flush it."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write one JSON document."""
    try:
        write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    except UnicodeEncodeError:  # a file name is not UTF-8
        write(json.dumps(msgspec.to_builtins(value), indent=2))


def write_json_line(value: Any) -> None:
    """Write one line of a stream of JSON documents."""
    write(msgspec.json.encode(value).decode())


def fail(message: str, hint: str = "") -> None:
    """Print an error and its hint on standard error."""
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    prefix = typer.style("inferd:", fg="red", bold=True) if color else "inferd:"
    sys.stderr.write(f"{prefix} {printable(message, sys.stderr.isatty())}\n")
    if hint:
        sys.stderr.write(f"  {printable(hint, sys.stderr.isatty())}\n")
    sys.stderr.flush()


def note(text: str) -> None:
    """Print a line on standard error that does not belong to the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write_dimmed(text: str) -> None:
    """Write text that does not belong to the result to standard error, dimmed, and flush it."""
    terminal = sys.stderr.isatty()
    dim = terminal and not os.environ.get("NO_COLOR")
    shown = printable(text, terminal)
    sys.stderr.write(typer.style(shown, dim=True) if dim and shown else shown)
    sys.stderr.flush()


def printable(text: str, terminal: bool) -> str:
    """Return *text*, without control characters if it goes to a terminal."""
    return text.translate(_CONTROLS) if terminal else text


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write aligned columns; line breaks in cells are replaced, so that each row is one line."""
    texts = [[" ".join(str(cell).splitlines()) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    for row in texts:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        write(printable("   ".join(cells).rstrip(), sys.stdout.isatty()))


def time_text(seconds: float) -> str:
    """Return a duration in words."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def fraction_bar(text: str, *, show: bool = True) -> Iterator[Fraction | None]:
    """Yield a function that takes progress from 0.0 to 1.0, or None where no bar can be shown.

    The bar appears with the first call, so no bar flashes for work that is done at once.
    """
    if not show or not sys.stderr.isatty():
        yield None
        return
    with _bar() as start:
        tasks: dict[str, Any] = {}

        def report(fraction: float) -> None:
            progress = start()
            if not tasks:
                tasks[text] = progress.add_task(text, total=1.0)
            progress.update(tasks[text], completed=fraction)

        yield report


@contextmanager
def bytes_bar(*, show: bool = True) -> Iterator[Bytes]:
    """Yield a function that takes a stage, the bytes done and the total, None if unknown."""
    if not show or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn()) as start:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            progress = start()
            if stage not in tasks:
                while tasks:
                    progress.remove_task(tasks.popitem()[1])
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


@contextmanager
def _bar(*columns: Any) -> Iterator[Callable[[], RichProgress]]:
    """Yield a function that shows the bar and returns it; the bar is removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *columns,
        console=Console(stderr=True),
        transient=True,
    )

    def start() -> RichProgress:
        progress.start()
        return progress

    try:
        yield start
    finally:
        progress.stop()

"""How commands write: sentences, tables, JSON, bars. Colours and bars on a terminal only."""

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
    """Write to standard output, at once."""
    sys.stdout.write(text + end)
    sys.stdout.flush()


def write_json(value: Any) -> None:
    """Write one JSON document."""
    try:
        write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
    except UnicodeEncodeError:  # a file's name is no UTF-8
        write(json.dumps(msgspec.to_builtins(value), indent=2))


def write_json_line(value: Any) -> None:
    """Write one line of a stream of JSON documents."""
    write(msgspec.json.encode(value).decode())


def fail(message: str, hint: str = "") -> None:
    """Say on standard error what went wrong and what to do."""
    color = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    prefix = typer.style("inferd:", fg="red", bold=True) if color else "inferd:"
    sys.stderr.write(f"{prefix} {printable(message, sys.stderr.isatty())}\n")
    if hint:
        sys.stderr.write(f"  {printable(hint, sys.stderr.isatty())}\n")
    sys.stderr.flush()


def note(text: str) -> None:
    """Say something on standard error that is no part of the result."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def whisper(text: str) -> None:
    """Write a piece of what is no part of the result to standard error, at once."""
    terminal = sys.stderr.isatty()
    dim = terminal and not os.environ.get("NO_COLOR")
    shown = printable(text, terminal)
    sys.stderr.write(typer.style(shown, dim=True) if dim and shown else shown)
    sys.stderr.flush()


def printable(text: str, terminal: bool) -> str:
    """Return *text*; for a terminal without control characters, which could steer it."""
    return text.translate(_CONTROLS) if terminal else text


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write aligned columns: a row is a line, whatever its cells hold, such as others' names."""
    texts = [[" ".join(str(cell).splitlines()) for cell in row] for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    for row in texts:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        write(printable("   ".join(cells).rstrip(), sys.stdout.isatty()))


def time_text(seconds: float) -> str:
    """Return a time for people."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def fraction_bar(text: str, *, show: bool = True) -> Iterator[Fraction | None]:
    """Give a function that is told 0.0 … 1.0; None where no bar can be shown.

    The bar appears with the first call, so that what is ready at once shows none.
    """
    if not show or not sys.stderr.isatty():
        yield None
        return
    with _bar() as start:
        tasks: dict[str, Any] = {}

        def tell(fraction: float) -> None:
            progress = start()
            if not tasks:
                tasks[text] = progress.add_task(text, total=1.0)
            progress.update(tasks[text], completed=fraction)

        yield tell


@contextmanager
def bytes_bar(*, show: bool = True) -> Iterator[Bytes]:
    """Give a function that is told a stage, the bytes done and, where known, all bytes."""
    if not show or not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(DownloadColumn(), TransferSpeedColumn()) as start:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int | None) -> None:
            progress = start()
            if stage not in tasks:
                while tasks:
                    progress.remove_task(tasks.popitem()[1])
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield tell


@contextmanager
def _bar(*columns: Any) -> Iterator[Callable[[], RichProgress]]:
    """Give a function that shows the bar, and returns it; at the end it goes away."""
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

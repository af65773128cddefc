"""Output of commands: sentences, tables, JSON, and on a terminal colors and progress bars."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec
import typer

from ..daemon.printable import are_colors_wanted, escape_controls

Fraction = Callable[[float], None]
Report = Callable[[str, float, float | None], None]
Columns = Mapping[str, str | Callable[[dict[str, Any]], object]]

ANSWER_CHARACTERS_MAX = 1000
_NOT_ON_TERMINALS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\t\n"}


class OutputFailed(Exception):
    """Standard output cannot be written: its disk is full, or its reader has closed the pipe. It is
    not an OSError, because those of other files are handled elsewhere.
    """

    def __init__(self, error: OSError):
        super().__init__(error.strerror or str(error))
        self.reader_closed = isinstance(error, BrokenPipeError)


class StandardOutput(io.TextIOWrapper):
    """Standard output, whose methods raise `OutputFailed`."""

    def write(self, text: str) -> int:
        with _output_failures():
            return super().write(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with _output_failures():
            super().flush()


def checked_output(stream: TextIO) -> StandardOutput:
    """Return standard output in place of *stream*, which then has no file."""
    assert isinstance(stream, io.TextIOWrapper), "Python has opened it"
    encoding, by_lines = stream.encoding, stream.line_buffering
    # A model may write characters that the terminal's encoding lacks.
    return StandardOutput(
        stream.detach(), encoding=encoding, errors="replace", line_buffering=bool(by_lines)
    )


@contextmanager
def _output_failures() -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise OutputFailed(exc) from None


def discard_output() -> None:
    """Discard further standard output, which Python would otherwise write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def discard_messages() -> None:
    """Discard further standard error, as `discard_output` does."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def confirm(question: str) -> bool:
    """Print a question on standard error, and return whether standard input answers yes.

    Click's function makes Ctrl-C an exit status of its own.
    """
    _write_error(f"{escape_controls(question)} [y/N]: ")
    return sys.stdin.readline(ANSWER_CHARACTERS_MAX).strip().lower() in ("y", "yes")


def write(text: str, end: str = "\n") -> None:
    """Write a message, a row or JSON to standard output and flush it. Control characters are
    escaped, also in a pipe, since its reader may be another program's terminal.
    """
    write_unchanged(escape_controls(text) + end)


def without_controls(text: str) -> str:
    """Return *text* without characters that a terminal would execute."""
    return text.translate(_NOT_ON_TERMINALS)


def write_answer(text: str, end: str = "\n") -> None:
    """Write a model's text: to a terminal without control characters, else unchanged."""
    write_unchanged((without_controls(text) if sys.stdout.isatty() else text) + end)


def write_unchanged(text: str) -> None:
    """Write text whose colors are the only control characters, and flush it."""
    sys.stdout.write(text)
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


def write_result(as_json: bool, document: Any, text: str) -> None:
    """Write the result of a command: *document* as JSON, or else *text*."""
    if as_json:
        write_json(document)
    else:
        write(text)


def fail(message: str, hint: str = "") -> None:
    """Print an error and its hint on standard error."""
    prefix = typer.style("inferd:", fg="red", bold=True) if has_colors(sys.stderr) else "inferd:"
    _write_error(f"{prefix} ")
    note(message)
    if hint:
        note(f"  {hint}")


def note(text: str) -> None:
    """Print a line on standard error that does not belong to the result."""
    _write_error(f"{escape_controls(text)}\n")


def end_terminal_line() -> None:
    """End a line of an answer before a message, where both are shown on a terminal."""
    if sys.stdout.isatty() and sys.stderr.isatty():
        _write_error("\n")


def write_dimmed(text: str) -> None:
    """Write a model's text that does not belong to its answer to standard error, dimmed."""
    shown = without_controls(text) if sys.stderr.isatty() else text
    _write_error(typer.style(shown, dim=True) if shown and has_colors(sys.stderr) else shown)


def _write_error(text: str) -> None:
    """Write to standard error. A message that cannot be written changes neither the result of a
    command nor its exit status.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard_messages()


def _is_in_foreground() -> bool:
    """Return whether this process has the terminal to itself. A shell's background job shares it
    with the commands that its user runs meanwhile.
    """
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except OSError:  # it does not control jobs
        return True


def has_colors(stream: TextIO) -> bool:
    """Return whether a stream shows colors: it is a terminal, and colors are wanted there."""
    return stream.isatty() and are_colors_wanted()


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write aligned columns, and "-" for None.

    Line breaks in cells are replaced, so that each row is one line.
    """
    texts = [[_cell_text("-" if c is None else c) for c in r] for r in (heads, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(heads))]
    for row in texts:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        write("   ".join(cells).rstrip())


def _cell_text(value: object) -> str:
    return escape_controls(" ".join(str(value).split("\n"))).replace("\t", " ")


def table_of(columns: Columns, entries: Iterable[dict[str, Any]]) -> None:
    """Write a table of entries; a column is a key of the entry, or a function of it."""
    rows = [[e[c] if isinstance(c, str) else c(e) for c in columns.values()] for e in entries]
    table(tuple(columns), rows)


def write_list(as_json: bool, name: str, entries: list[dict[str, Any]], columns: Columns) -> None:
    """Write entries as JSON with the key *name*, or else as a table."""
    if as_json:
        write_json({name: entries})
    else:
        table_of(columns, entries)


def time_text(seconds: float) -> str:
    """Return a duration in words."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def fraction_bar(text: str, *, show: bool = True) -> Iterator[Fraction | None]:
    """Yield a function that takes progress from 0.0 to 1.0, or None where no bar can be shown."""
    with _bar(show) as report:
        yield report and (lambda fraction: report(text, fraction, 1.0))


@contextmanager
def bytes_bar(*, show: bool = True) -> Iterator[Report]:
    """Yield a function that takes a stage, the bytes done and the total, None if unknown."""
    with _bar(show, of_bytes=True) as report:
        yield report or (lambda stage, done, total: None)


@contextmanager
def _bar(show: bool, *, of_bytes: bool = False) -> Iterator[Report | None]:
    """Yield a function that updates the bar of a stage; the bar is removed at the end.

    The bar appears with the first call, so no bar flashes for work that is done at once.
    """
    if not show or not sys.stderr.isatty() or not _is_in_foreground():
        yield None
        return
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        *((rich.DownloadColumn(), rich.TransferSpeedColumn()) if of_bytes else ()),
        console=Console(stderr=True),
        transient=True,
    )
    tasks: dict[str, Any] = {}
    ended = False

    def report(stage: str, done: float, total: float | None) -> None:
        if ended:  # a model that a session loads again after a loss
            return
        bar.start()
        if stage not in tasks:
            while tasks:
                bar.remove_task(tasks.popitem()[1])
            tasks[stage] = bar.add_task(stage, total=total)
        bar.update(tasks[stage], completed=done, total=total)

    try:
        yield report
    finally:
        ended = True
        bar.stop()

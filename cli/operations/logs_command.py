"""`inferd logs` and `inferd log-level`: the daemon's log, and the levels of its loggers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from ...backends.errors import ConnectionLost, NotFound
from ...backends.library import LEVELS
from ...daemon.logs.log_lines import (
    following_lines,
    last_lines,
    log_place,
    open_log,
    systemd_journal_lines,
)
from ...daemon.printable import escape_controls
from .. import completion
from ..client import client_of, socket_of
from ..options import JsonOutput, SocketPath
from ..output import has_colors, table, write_json, write_unchanged

LINES = 100
LINES_MAX = 1_000_000
HEAD_KEYS = ("timestamp", "level", "logger", "event", "exception")
"""Keys of an event that are not printed as fields."""
LogLevel = Literal["debug", "info", "warning", "error"]
LEVEL_COLORS = {"debug": "cyan", "info": "green", "warning": "yellow", "error": "red"}


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Also show new lines as they are written.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option(
            "--lines", "-n", metavar="N", min=0, max=LINES_MAX, help="Show the last N lines."
        ),
    ] = LINES,
    level: Annotated[
        LogLevel,
        typer.Option(
            metavar="LEVEL", help="The lowest level to show: debug, info, warning or error."
        ),
    ] = "debug",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Show the daemon's log.

    It is read from the daemon's log file, or else from systemd's journal. With --json each event is
    a line of JSON.
    """
    colors = has_colors(sys.stdout)
    matches = partial(_is_shown, level)
    for line in _lines(socket, lines, level, matches, follow=follow):
        if matches(line):
            text = as_text(line) if as_json else format_line(line, colors=colors)
            write_unchanged(f"{text}\n")


def _lines(
    socket: Path | None,
    count: int,
    level: LogLevel,
    matches: Callable[[bytes], bool],
    *,
    follow: bool,
) -> Iterator[bytes]:
    """Yield the lines of the daemon's log; if none answers, those of the last daemon's log."""
    try:
        with client_of(socket) as client:
            stats = client.stats()
        place = log_place(stats, None)
    except ConnectionLost:
        from ...daemon.config.sources import load_config

        if (place := log_place({}, load_config({"socket": socket_of(socket)}))) is None:
            raise
    if isinstance(place, Path):
        with open_log(place) as file:
            yield from last_lines(file, count, matches)
            if follow:
                yield from following_lines(place, file)
    elif place is not None:
        yield from systemd_journal_lines(place, count, level, follow=follow)
    else:
        raise NotFound(
            f"the daemon (pid {stats['pid']}) writes its log to standard error, which is not kept",
            hint="read its terminal; `inferd start` keeps the log, and so does --set log-file=PATH",
        )


def _is_shown(level: LogLevel, line: bytes) -> bool:
    """Return whether a line is an event of *level* or above, or not an event."""
    event = None if level == "debug" else _event(line)
    return event is None or LEVELS.get(str(event.get("level")), math.inf) >= LEVELS[level]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return event if isinstance(event, dict) else None


def as_text(line: bytes) -> str:
    """Return a line of the log as it is, except for control characters."""
    return escape_controls(line.decode("utf-8", "replace"))


def format_line(line: bytes, *, colors: bool) -> str:
    """Return a line of the log as text for a terminal."""
    event = _event(line)
    if event is None:
        return as_text(line)
    level = _text(event.get("level", ""))
    head = (
        _text(event.get("timestamp", "")),
        _styled(f"{level:<7}", colors, fg=LEVEL_COLORS.get(level)),
        f"{'[' + _text(event.get('logger', '')) + ']':<11}",
        _styled(_text(event.get("event", "")), colors, bold=True),
    )
    fields = [f"{_text(k)}={_text(v)}" for k, v in event.items() if k not in HEAD_KEYS]
    text = " ".join([*head, *fields])
    exception = escape_controls(str(event.get("exception", "")))
    return f"{text}\n{exception}" if exception else text


def _styled(text: str, colors: bool, **style: Any) -> str:
    return typer.style(text, **style) if colors else text


def _text(value: Any) -> str:
    """Return a value as it is, or as JSON where it would be ambiguous."""
    if isinstance(value, str) and value.isprintable() and value and " " not in value:
        return value
    return escape_controls(msgspec.json.encode(value).decode())


def log_level(
    levels: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOGGER=]LEVEL",
            help="Levels, such as scheduler=debug llama=error.",
            autocompletion=completion.log_levels,
        ),
    ] = None,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Change the log levels of the daemon's loggers, or print them.

    A level without a logger applies to all loggers. The levels stay in force until the daemon reads
    its configuration again. Needs the right to manage models.
    """
    with client_of(socket) as client:
        loggers = client.log_level()
        if levels:
            loggers = client.log_level(_read_levels(levels, loggers))
    if as_json:
        write_json({"levels": loggers})
    else:
        table(("LOGGER", "LEVEL"), list(loggers.items()))


def _read_levels(pairs: list[str], loggers: dict[str, str]) -> dict[str, str]:
    """Return levels by logger; later pairs override earlier ones."""
    levels: dict[str, str] = {}
    for pair in pairs:
        logger, equals, level = pair.rpartition("=")
        levels |= {logger: level} if equals else dict.fromkeys(loggers, level)
    return levels

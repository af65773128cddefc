"""`inferd logs` shows the daemon's log, and `inferd log-level` changes what is in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ....backends.errors import ConnectionLost, NotFound
from ..client import client_of
from ..options import JsonOutput, SocketPath
from ..output import printable, table, write, write_json
from .log_lines import following_lines, journal_lines, last_lines, open_log

LINES = 100
LINES_MAX = 1_000_000
HEAD = ("timestamp", "level", "logger", "event", "exception")
"""What is not shown among an event's fields."""
COLORS = {"debug": "cyan", "info": "green", "warning": "yellow", "error": "red"}


class Level(StrEnum):
    """From which on events are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show what comes, too.")] = False,
    lines: Annotated[
        int,
        typer.Option(
            "--lines", "-n", metavar="N", min=0, max=LINES_MAX, help="How many of the last lines."
        ),
    ] = LINES,
    level: Annotated[
        Level,
        typer.Option(
            "--level", metavar="LEVEL", help="Only debug, info, warning or error and above."
        ),
    ] = Level.DEBUG,
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Show the daemon's log.

    It is read from the file that the setting `log-file` names, or else from systemd's journal. With
    --json each event is a line of JSON.
    """
    terminal = sys.stdout.isatty()
    colors = terminal and not os.environ.get("NO_COLOR")
    wanted = _filter(level)
    for line in _lines(socket, lines, level, wanted, follow=follow):
        if wanted(line):
            text = line.decode("utf-8", "replace") if as_json else shown(line, colors=colors)
            write(text if colors and not as_json else printable(text, terminal))


def _lines(
    socket: Path | None,
    count: int,
    level: Level,
    wanted: Callable[[bytes], bool],
    *,
    follow: bool,
) -> Iterator[bytes]:
    """Give the log's lines, from where the daemon says that it is; one that does not answer has
    left it where the configuration says.
    """
    try:
        with client_of(socket) as client:
            stats = client.stats()
    except ConnectionLost:
        if (configured := _configured_file()) is None:
            raise
        stats = {"log": {"file": str(configured)}}
    if stats["log"]["file"] is not None:
        path = Path(stats["log"]["file"])
        with open_log(path) as file:
            yield from last_lines(file, count, wanted)
            if follow:
                yield from following_lines(path, file)
    elif stats["log"]["journal"] is not None:
        yield from journal_lines(stats["log"]["journal"], stats["pid"], count, level, follow=follow)
    else:
        raise NotFound(
            f"the daemon (pid {stats['pid']}) writes its log to its standard error, which nobody"
            " keeps",
            hint="look where it was started, or let it be kept: `inferd serve --set log-file=PATH`",
        )


def _configured_file() -> Path | None:
    from ...config.sources import load_config

    return load_config().log_file


def _filter(level: Level) -> Callable[[bytes], bool]:
    """Return what tells whether a line's event is of *level* or above; what is no event is."""
    rank = {str(name): number for number, name in enumerate(Level)}

    def wanted(line: bytes) -> bool:
        if level is Level.DEBUG:
            return True
        event = _event(line)
        return event is None or rank.get(str(event.get("level")), len(rank)) >= rank[level]

    return wanted


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return event if isinstance(event, dict) else None


def shown(line: bytes, *, colors: bool) -> str:
    """Return a line of the log for people."""
    event = _event(line)
    if event is None:
        return printable(line.decode("utf-8", "replace"), colors)
    level = _text(event.get("level", ""))
    head = (
        _text(event.get("timestamp", "")),
        _styled(f"{level:<7}", colors, fg=COLORS.get(level)),
        f"{'[' + _text(event.get('logger', '')) + ']':<11}",
        _styled(_text(event.get("event", "")), colors, bold=True),
    )
    fields = [f"{k}={_text(v)}" for k, v in event.items() if k not in HEAD]
    told = " ".join([*head, *fields])
    exception = str(event.get("exception", ""))
    return f"{told}\n{printable(exception, colors)}" if exception else told


def _styled(text: str, colors: bool, **style: Any) -> str:
    return typer.style(text, **style) if colors else text


def _text(value: Any) -> str:
    """Return a value as it is, or, where that could be misread, as JSON."""
    if isinstance(value, str) and value.isprintable() and value and " " not in value:
        return value
    return msgspec.json.encode(value).decode().translate(_DELETE)


_DELETE = dict.fromkeys((0x7F, *range(0x80, 0xA0)))
"""Control characters that JSON leaves as they are."""


def log_level(
    levels: Annotated[
        list[str] | None,
        typer.Argument(metavar="[LOGGER=]LEVEL", help="Such as scheduler=debug llama=error."),
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
    """Return levels by logger; later pairs come before earlier ones."""
    levels: dict[str, str] = {}
    for pair in pairs:
        logger, equals, level = pair.rpartition("=")
        levels |= {logger: level} if equals else dict.fromkeys(loggers, level)
    return levels


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (logs, log_level):
        app.command()(command)

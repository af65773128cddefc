"""`inferd usage`: sums of tokens, compute time, requests and refusals by user, model and time."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ...backends.texts import seconds_of_span
from ..one_shot import OneShotClient
from ..options import AllUsers, JsonOutput, Label, SocketPath
from ..output import Columns, table_of, time_text, write, write_json
from .status_commands import user_text


def _parse_span(text: str) -> float:
    try:
        return seconds_of_span(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from None


def _start_text(row: Mapping[str, Any]) -> str:
    return f"{datetime.fromtimestamp(row['start'], UTC):%Y-%m-%d %H:%M}"


def _compute_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else time_text(seconds)


GROUPS: dict[str, tuple[str, Any]] = {
    "hour": ("HOUR (UTC)", _start_text),
    "day": ("DAY (UTC)", lambda row: _start_text(row)[:10]),
    "user": ("USER", user_text),
    "label": ("LABEL", "label"),
    "key": ("KEY", "key"),
    "model": ("MODEL", "model"),
}
AMOUNTS: Columns = {
    "REQUESTS": "requests",
    "REFUSED": "refused",
    "PROMPT": "prompt_tokens",
    "CACHED": "cached_tokens",
    "GENERATED": "generated_tokens",
    "DRAFTED": "drafted_tokens",
    "COMPUTE": lambda row: _compute_text(row["compute_s"]),
}


def _check_columns(names: list[str] | None) -> list[str] | None:
    for name in names or ():
        if name not in GROUPS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(GROUPS)}")
    return names


def usage(
    by: Annotated[
        list[str] | None,
        typer.Option(
            "--by",
            metavar="COLUMN",
            callback=_check_columns,
            help="user, model, label, key, hour or day (of UTC); repeatable. Without it: model.",
            show_default=False,
        ),
    ] = None,
    since: Annotated[
        float,
        typer.Option(
            "--since",
            metavar="TIME",
            help="The last time, such as 90m, 24h or 7d, from the beginning of an hour on.",
            parser=_parse_span,
        ),
    ] = "7d",  # type: ignore[assignment]  # typer parses it
    all_users: AllUsers = False,
    label: Label = "",
    socket: SocketPath = None,
    as_json: JsonOutput = False,
) -> None:
    """Show the tokens, the compute time, and the requests of users, models and hours.

    Prompt tokens include the cached ones. The time is that of the model's steps, divided among the
    turns that they computed.
    """
    columns = list(dict.fromkeys(by or ["model"]))
    with OneShotClient(socket, label=label) as client:
        result = client.usage(columns, since_s=since, all_users=all_users)
    if as_json:
        write_json({"since": result.since, "usage": result.usage, "limits": result.limits})
        return
    for limit in result.limits:
        ends = datetime.fromtimestamp(limit["ends_at"], UTC)
        write(
            "{bound}: {used:.0f} of {limit}".format(**limit) + f", until {ends:%Y-%m-%d %H:%M} UTC"
        )
    if not result.usage:
        write("no usage")
        return
    table_of(dict(GROUPS[name] for name in columns) | dict(AMOUNTS), result.usage)

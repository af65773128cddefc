"""Options that several commands share, and the exit statuses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer

from ..ipc.names import Priority
from . import completion

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_BUSY = 4
EXIT_INTERRUPTED = 130
EXIT_READER_CLOSED = 141


def exit_after(ended_by: signal.Signals | None) -> None:
    """Exit as an interrupted command if Ctrl-C has stopped a server, which has ended in order."""
    if ended_by is signal.SIGINT:
        raise typer.Exit(EXIT_INTERRUPTED)


def _want_json(ctx: typer.Context, value: bool) -> bool:
    # The option may stand before or after the command; it also applies to errors.
    ctx.meta["inferd.json"] = value or ctx.meta.get("inferd.json", False)
    return bool(ctx.meta["inferd.json"])


def _keep_socket(ctx: typer.Context, value: Path | None) -> Path | None:
    ctx.meta["inferd.socket"] = value or ctx.meta.get("inferd.socket")
    return value or ctx.meta["inferd.socket"]


AllUsers = Annotated[
    bool, typer.Option("--all", help="Include all users; needs the right see-all.")
]


def _keep_label(ctx: typer.Context, value: str) -> str:
    ctx.meta["inferd.label"] = value
    return value


Label = Annotated[
    str,
    typer.Option(
        "--label",
        metavar="LABEL",
        help="The label of a guest, an agent or a tenant among your programs.",
        show_default=False,
        callback=_keep_label,
    ),
]
SocketPath = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help="The daemon's socket.",
        show_default=False,
        callback=_keep_socket,
    ),
]
JsonOutput = Annotated[
    bool, typer.Option("--json", help="Print JSON.", callback=_want_json, is_eager=True)
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The configuration file.", show_default=False),
]
ModelsDir = Annotated[
    Path | None,
    typer.Option("--models-dir", metavar="PATH", help="The models directory.", show_default=False),
]
StateDir = Annotated[
    Path | None, typer.Option(metavar="PATH", help="The directory of persistent state.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Unload it even if it is in use; running turns fail.")
]
ModelName = Annotated[
    str, typer.Argument(help="The model's name.", autocompletion=completion.models)
]
ModelOrFile = Annotated[
    str, typer.Argument(help="A model's name, or its file.", autocompletion=completion.models)
]
SystemPrompt = Annotated[
    str | None, typer.Option("--system", metavar="TEXT", help="The system prompt.")
]
PriorityOption = Annotated[
    Priority,
    typer.Option(
        "--priority", metavar="|".join(get_args(Priority)), help="The priority class in the queue."
    ),
]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="KEY=VALUE",
        help="A parameter, such as top-k=20 (`inferd parameters` lists them); repeatable.",
        autocompletion=completion.options,
    ),
]
SettingPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting, models.NAME.KEY or defaults.KEY; repeatable.",
        autocompletion=completion.settings,
    ),
]


def read_pairs(pairs: list[str] | None, flag: str = "--option") -> dict[str, Any]:
    """Return KEY=VALUE pairs as a mapping; a value that is not valid JSON is a text. If a key is
    repeated, the values of a parameter that takes several are collected; otherwise the last holds.
    """
    from ..backends.params import BY_SPELLING

    values: dict[str, Any] = {}
    for key, text in _split_pairs(pairs, flag):
        value = json_or_text(text)
        parameter = BY_SPELLING.get(key.replace("_", "-"))
        if key in values and parameter is not None and parameter.kind in ("texts", "tokens"):
            value = [*_as_list(values[key]), *_as_list(value)]
        values[key] = value
    return values


def read_file(path: Path, bytes_max: int, name: str) -> bytes:
    """Return the content of a file that an option or argument names; *name* is for errors.

    :raises typer.BadParameter: it cannot be read, or has more than *bytes_max* bytes.
    """
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as exc:
        raise typer.BadParameter(f"{name}: {exc.strerror}") from None
    if len(data) > bytes_max:
        raise typer.BadParameter(f"{name}: more than {bytes_max} bytes")
    return data


def json_or_text(value: str) -> Any:
    """Return the JSON value of a text, or the text if it is not valid JSON."""
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_settings(pairs: list[str] | None) -> dict[str, Any]:
    """Return the pairs of `--set` as flags for `load_config`: KEY is a setting, `models.NAME.KEY`
    or `defaults.KEY`.
    """
    return {
        key if "." in key else f"set {key}": json_or_text(value) if "." in key else value
        for key, value in _split_pairs(pairs, "--set")
    }


def _split_pairs(pairs: list[str] | None, flag: str) -> Iterator[tuple[str, str]]:
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{flag} {pair!r} is not of the form KEY=VALUE")
        yield key.strip(), value

"""Values with their own syntax: paths, the socket's mode and group, the address of metrics, the
destination of spans, log levels.
"""

from __future__ import annotations

import grp
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...backends.library import LEVELS
from ...backends.texts import choice_of, shorten
from ...ipc.metrics_address import PORT_MAX, SOCKET_PATH_BYTES_MAX, parse_address
from ...ipc.model_names import MODEL_NAME
from ...ipc.paths import SYSTEM_SOCKET
from ..traces.target import TARGET_CHARACTERS_MAX, parse_target
from .access_settings import gid_of
from .declaration import TEXT, Form, Schema, one_of

GROUP_DEFAULT = "inferd"
"""The group whose members may connect to the machine's socket."""
_OCTAL = re.compile(r"(0o?)?[0-7]{3}")
LOGGERS = {
    "daemon": "the daemon itself: start and end, configuration, models, memory, components",
    "ipc": "connections and calls",
    "sessions": "conversations, and the journal of those with an id",
    "jobs": "requests that outlive their client, and the process that answers them",
    "scheduler": "tasks in the engines: queued, admitted, parked, finished, failed",
    "backends": "the engine that runs a model: failed steps",
    "llama": "llama.cpp's output, and the last output of a worker process that crashes",
}
"""Names of the loggers, and the events of each."""


def parse_path(value: Any) -> Path:
    """Return an absolute path.

    :raises ValueError: the value is not a path.
    """
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError(f"{shorten(value)} is not a path")
    return Path(os.path.expanduser(value)).absolute()  # `Path.expanduser` may raise RuntimeError


def _parse_socket_path(value: Any) -> Path:
    path = parse_path(value)
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ValueError(f"{str(path)!r} is longer than {SOCKET_PATH_BYTES_MAX} bytes")
    return path


class Mode(int):
    """A socket's permission bits; their text is octal."""

    def __str__(self) -> str:
        return f"{int(self):04o}"


class GroupName(str):
    """The name of a group; an empty one stands for the daemon's own group."""


def _parse_mode(value: Any) -> Mode:
    if isinstance(value, Mode):
        return value
    if not isinstance(value, str) or not _OCTAL.fullmatch(value):
        given = shorten(value)
        raise ValueError(f"{given} is not a mode: write octal digits in quotes, such as '0660'")
    mode = Mode(value.removeprefix("0o"), 8)
    if mode & 0o600 != 0o600 or mode & 0o111:
        raise ValueError(f"{shorten(value)}: write 6 for the owner, and no execute permission")
    return mode


def _parse_group(value: Any) -> GroupName:
    if not isinstance(value, str):
        raise ValueError(f"{shorten(value)} is not the name of a group")
    if value:
        gid_of(value)
    return GroupName(value)


def group_default(socket: Path) -> GroupName:
    """Return the default group of *socket*: `inferd` for the machine's socket, if it exists and the
    daemon may assign it.
    """
    try:
        gid = grp.getgrnam(GROUP_DEFAULT).gr_gid
    except KeyError:
        return GroupName()
    may = os.geteuid() == 0 or gid in (os.getegid(), *os.getgroups())
    return GroupName(GROUP_DEFAULT if socket == SYSTEM_SOCKET and may else "")


def parse_log_levels(value: Any) -> dict[str, str]:
    """Return levels by logger, from a table or a text such as `scheduler=debug,llama=error`.

    :raises ValueError: the logger or the level is unknown.
    """
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        value = {logger.strip(): level.strip() for logger, _, level in pairs}
    if not isinstance(value, Mapping):
        given = shorten(value)
        raise ValueError(f"{given} is not a table of levels, or a text such as llama=debug")
    levels = {}
    for name, level in value.items():
        logger = choice_of(name, LOGGERS)
        if logger is None:
            raise ValueError(f"{name!r} is not a logger: there are {', '.join(LOGGERS)}")
        try:
            levels[logger] = one_of(level, [*LEVELS])
        except ValueError as exc:
            raise ValueError(f"{logger}: {exc}") from None
    return levels


def _log_levels_schema() -> Schema:
    level: Schema = {"enum": list(LEVELS)}
    loggers: Schema = {
        "type": "object",
        "properties": {logger: level | {"description": about} for logger, about in LOGGERS.items()},
        "additionalProperties": False,
    }
    pair = f"\\s*({'|'.join(LOGGERS)})\\s*=\\s*({'|'.join(LEVELS)})\\s*"
    return {"anyOf": [loggers, {"type": "string", "pattern": f"^({pair}(,{pair})*)?$"}]}


PRELOADS_MAX = 64


def _parse_models(value: Any) -> tuple[str, ...]:
    """Return names of models, which are a list, or a text with commas."""
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or len(names) > PRELOADS_MAX:
        raise ValueError(f"{shorten(value)} is not a list of at most {PRELOADS_MAX} models")
    names = [name.strip() if isinstance(name, str) else name for name in names]
    names = [name for name in names if name != ""]
    if wrong := [n for n in names if not isinstance(n, str) or not MODEL_NAME.fullmatch(n)]:
        raise ValueError("\n".join(f"{shorten(name)} is not the name of a model" for name in wrong))
    return tuple(dict.fromkeys(names))


PATH = Form(parse_path, TEXT)
MODELS = Form(
    _parse_models,
    {
        "anyOf": [
            {
                "type": "array",
                "maxItems": PRELOADS_MAX,
                "items": {"type": "string", "pattern": f"^{MODEL_NAME.pattern}$"},
            },
            {"type": "string"},
        ]
    },
)
SOCKET_PATH = Form(_parse_socket_path, TEXT | {"maxLength": SOCKET_PATH_BYTES_MAX})
ADDRESS = Form(
    parse_address,
    {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": PORT_MAX},
            {"type": "string", "pattern": r"^\s*([Oo][Ff][Ff]|(unix:)?/.+|(.*:)?[0-9]{1,5})\s*$"},
        ]
    },
)
TARGET = Form(
    # This reads the environment of the process, as OpenTelemetry's SDK does.
    lambda value: parse_target(value, os.environ),
    {
        "type": "string",
        "maxLength": TARGET_CHARACTERS_MAX,
        "pattern": r"^\s*([Oo][Ff][Ff]|[Oo][Tt][Ll][Pp]|file:/.*|[Hh][Tt]{2}[Pp][Ss]?://.+)\s*$",
    },
)
MODE = Form(_parse_mode, {"type": "string", "pattern": f"^{_OCTAL.pattern}$"})
GROUP = Form(_parse_group, {"type": "string"})
LOG_LEVELS = Form(parse_log_levels, _log_levels_schema())

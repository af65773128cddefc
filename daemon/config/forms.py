"""Values with their own syntax: paths, the address of metrics, the destination of spans."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..metrics.listen_address import PORT_MAX, parse_address
from ..traces.target import TARGET_CHARACTERS_MAX, parse_target
from .declaration import Form, Schema

SOCKET_BYTES_MAX = 107
"""Linux' limit on the path of a Unix socket: `sun_path` without its final NUL."""
TEXT: Schema = {"type": "string", "minLength": 1}


def parse_path(value: Any) -> Path:
    """Return an absolute path.

    :raises ValueError: the value is not a path.
    """
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise ValueError(f"{value!r} is not a path")
    return Path(value).expanduser().absolute()


def _parse_socket_path(value: Any) -> Path:
    path = parse_path(value)
    if len(os.fsencode(path)) > SOCKET_BYTES_MAX:
        raise ValueError(f"{str(path)!r} is longer than {SOCKET_BYTES_MAX} bytes")
    return path


PATH = Form(parse_path, TEXT)
SOCKET_PATH = Form(_parse_socket_path, TEXT | {"maxLength": SOCKET_BYTES_MAX})
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

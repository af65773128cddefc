"""The first exchange with a daemon: errors of connecting, and the check of its hello.

The clients with and without an event loop share it, so it imports neither asyncio nor anyio.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..backends.errors import (
    ConnectionLost,
    InferdError,
    InvalidArgument,
    PermissionDenied,
    ProtocolError,
    VersionMismatch,
)
from .messages import PROTOCOL_VERSION, ServerHello


def connect_error(path: str, exc: OSError) -> InferdError:
    """Return the error to raise after a failed connect to *path*."""
    if isinstance(exc, PermissionError):
        return PermissionDenied(
            f"the socket {path} is not open to this user",
            hint="ask the daemon's operator for access, or start your own with `inferd start`",
        )
    if isinstance(exc, FileNotFoundError | ConnectionRefusedError | ConnectionResetError):
        return ConnectionLost(
            f"no daemon answers at {path}: {exc.strerror}",
            hint="start it with `inferd start`, or set INFERD_SOCKET to its socket",
        )
    return InvalidArgument(
        f"cannot connect to {path}: {exc.strerror or exc}",
        hint="set INFERD_SOCKET or pass `path`; a socket's path has at most 107 bytes",
    )


def connect_timeout_error(path: str, timeout_s: float) -> ConnectionLost:
    """Return the error to raise when the daemon has sent no hello within *timeout_s*."""
    return ConnectionLost(
        f"the daemon at {path} did not answer within {timeout_s:g} s",
        hint="see `inferd status` and the daemon's log, or raise connect_timeout",
    )


def read_server_hello(path: str, fields: dict[str, Any]) -> ServerHello:
    """Return the daemon's hello.

    :raises VersionMismatch: the daemon speaks another major version.
    :raises ProtocolError: a field is missing or has another type.
    """
    theirs = fields.get("protocol")
    if not isinstance(theirs, list) or theirs[:1] != [PROTOCOL_VERSION[0]]:
        spoken = ".".join(map(str, theirs)) if isinstance(theirs, list) else theirs
        raise VersionMismatch(
            f"the daemon at {path} ({fields.get('software', 'unknown')}) speaks version"
            f" {spoken} of the protocol, this client {'.'.join(map(str, PROTOCOL_VERSION))}",
            data={"protocol": theirs},
        )
    try:
        return msgspec.convert(fields, ServerHello)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"the daemon's hello cannot be read: {exc}") from None

"""Default paths of the daemon's socket, for clients and for the daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SYSTEM_SOCKET = Path("/run/inferd/inferd.sock")


def client_socket_path(
    environ: Mapping[str, str] | None = None, system: Path = SYSTEM_SOCKET
) -> Path:
    """Return the socket to which a client without a path connects.

    It is `INFERD_SOCKET` if that is set, else the user's own socket under `XDG_RUNTIME_DIR`. It is
    the system's socket if neither variable is set, or if only the system's socket exists.
    """
    environ = os.environ if environ is None else environ
    path = daemon_socket_path(environ, system)
    if environ.get("INFERD_SOCKET") or os.path.exists(path) or not os.path.exists(system):
        return path
    return system


def daemon_socket_path(
    environ: Mapping[str, str] | None = None, system: Path = SYSTEM_SOCKET
) -> Path:
    """Return the socket on which a daemon without a configured path listens."""
    environ = os.environ if environ is None else environ
    if environ.get("INFERD_SOCKET"):
        return Path(environ["INFERD_SOCKET"])
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"], "inferd", "inferd.sock")
    return system

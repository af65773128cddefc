"""Installed systemd services, found by their sockets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...ipc.paths import runtime_folder
from .install import UNITS, Service

BOOTED = Path("/run/systemd/system")
"""It exists where systemd runs (`sd_booted(3)`)."""


def installed_service(
    socket: Path, environ: Mapping[str, str] = os.environ, root: Path | None = None
) -> Service | None:
    """Return the installed service that listens on *socket*; units are looked up below *root*."""
    for user in (True, False):
        service = Service(user=user, root=root)
        if str(socket) in sockets_of(service, environ):
            return service
    return None


def sockets_of(service: Service, environ: Mapping[str, str]) -> list[str]:
    """Return the paths on which an installed service listens, none if it is not installed."""
    runtime = str(runtime_folder(environ) or "") if service.user else "/run"
    try:
        streams = directives_of([service.units / UNITS[1]]).get("ListenStream", [])
    except PermissionError:  # HOME is that of another user, as after `su`
        return []
    return [stream.replace("%t", runtime) for stream in streams]


def directives_of(units: Sequence[Path]) -> dict[str, list[str]]:
    """Return the values of the existing *units* by directive, in order."""
    found: dict[str, list[str]] = {}
    for unit in units:
        for line in unit.read_text(errors="replace").splitlines() if unit.exists() else ():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith(("#", ";")):
                found.setdefault(name.strip(), []).append(value.strip())
    return found

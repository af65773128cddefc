"""The folder into which `inferd pull` writes, and the daemon that gets the file from there.

A daemon opens no connections to other machines. So the command downloads, and hands the file to a
daemon with another models directory as a descriptor, if the user may manage that daemon.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...backends.errors import (
    ConnectionLost,
    InferdError,
    PermissionDenied,
    UnsupportedOperation,
)
from ...ipc.messages import AddModelResult


class Destination(msgspec.Struct, frozen=True):
    """A folder for the downloaded file."""

    folder: Path
    is_handed_over: bool = False
    """Whether the daemon copies the file from there to its own models directory."""
    exists: bool = False
    """Whether the daemon that gets the file has one of this name already."""
    note: str = ""
    """The reason why the daemon will not offer the file, if so."""


class Caller(msgspec.Struct, frozen=True):
    """The user of the command, with their folders."""

    uid: int
    models_dir: Path
    cache: Path


class Answer(msgspec.Struct, frozen=True):
    """The answer of the daemon at *socket* to `add_model` without a file, or its error."""

    socket: Path
    found: AddModelResult | InferdError
    is_connected: bool = True
    owner: int | None = None
    """The user whose folder the answer names, if it can be examined."""
    start: str = ""
    """The command that starts the installed service of the socket, if there is one."""


def choose_destination(caller: Caller, answer: Answer) -> Destination:
    """Return the place for a model, and the reason if the daemon will not offer it there."""
    own, error = caller.models_dir, answer.found
    if isinstance(error, AddModelResult):
        folder = Path(error.file).parent
        if folder == own or answer.owner == caller.uid:
            return Destination(folder)
        return Destination(caller.cache, is_handed_over=True, exists=error.size_bytes > 0)
    if isinstance(error, ConnectionLost) and not answer.start:
        return Destination(own)
    if isinstance(error, ConnectionLost):
        reason = f"it does not run; `{answer.start}` starts it, then pull again"
    elif isinstance(error, PermissionDenied) and answer.is_connected:
        reason = (
            "for that you need the right `manage`. `sudo inferd pull` adds it for all users;"
            " `inferd run FILE` passes the file"
        )
    elif isinstance(error, PermissionDenied):
        reason = (
            "its socket is not open to you. `sudo inferd pull` adds it for all users; `inferd"
            " start` starts a daemon of your own"
        )
    elif isinstance(error, UnsupportedOperation):
        reason = "it takes no files (a fleet's entry, or a daemon of an older version)"
    else:
        reason = error.message
    unseen = f"the model goes to {own}, from which the daemon at {answer.socket} offers nothing"
    return Destination(own, note=f"{unseen}: {reason}")

"""The configuration's words for who may connect: the socket's mode and group."""

from __future__ import annotations

import grp
import os
import re
from pathlib import Path
from typing import Any

from ...ipc.paths import SYSTEM_SOCKET
from .access_settings import gid_of
from .declaration import Form

GROUP_DEFAULT = "inferd"
"""The group whose members may connect to the machine's socket."""
_OCTAL = re.compile(r"(0o?)?[0-7]{3}")


class Mode(int):
    """A socket's permission bits, in octal where they are text."""

    def __str__(self) -> str:
        return f"{int(self):04o}"


class GroupName(str):
    """A group of the machine; empty: the daemon's own."""


def _parse_mode(value: Any) -> Mode:
    """Return the mode that a text of three octal digits means, as 0660.

    :raises ValueError: it is none.
    """
    if isinstance(value, Mode):
        return value
    if not isinstance(value, str) or not _OCTAL.fullmatch(value):
        raise ValueError(f"{value!r} is no mode: write it as text in octal, as '0660'")
    mode = Mode(value.removeprefix("0o"), 8)
    if mode & 0o600 != 0o600 or mode & 0o111:
        raise ValueError(f"{value!r}: the owner reads and writes a socket, and nobody runs it")
    return mode


def _parse_group(value: Any) -> GroupName:
    """Return a group's name; empty: none.

    :raises ValueError: there is no such group.
    """
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no group's name")
    if value:
        gid_of(value)
    return GroupName(value)


MODE = Form(_parse_mode, {"type": "string", "pattern": f"^{_OCTAL.pattern}$"})
GROUP = Form(_parse_group, {"type": "string"})


def group_default(socket: Path) -> GroupName:
    """Return the group that a socket is given where nobody says so: the machine's, if the daemon
    may give it that.
    """
    try:
        gid = grp.getgrnam(GROUP_DEFAULT).gr_gid
    except KeyError:
        return GroupName()
    may = os.geteuid() == 0 or gid in (os.getegid(), *os.getgroups())
    return GroupName(GROUP_DEFAULT if socket == SYSTEM_SOCKET and may else "")

"""The socket's mode and group, which decide which users may connect."""

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
    """A socket's permission bits; their text is octal."""

    def __str__(self) -> str:
        return f"{int(self):04o}"


class GroupName(str):
    """The name of a group; empty: the daemon's own group."""


def _parse_mode(value: Any) -> Mode:
    if isinstance(value, Mode):
        return value
    if not isinstance(value, str) or not _OCTAL.fullmatch(value):
        raise ValueError(f"{value!r} is not a mode: write octal digits in quotes, such as '0660'")
    mode = Mode(value.removeprefix("0o"), 8)
    if mode & 0o600 != 0o600 or mode & 0o111:
        raise ValueError(f"{value!r}: write 6 for the owner, and no execute permission")
    return mode


def _parse_group(value: Any) -> GroupName:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a group")
    if value:
        gid_of(value)
    return GroupName(value)


MODE = Form(_parse_mode, {"type": "string", "pattern": f"^{_OCTAL.pattern}$"})
GROUP = Form(_parse_group, {"type": "string"})


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

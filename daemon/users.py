"""Whose connections are served: users whom the kernel can tell from each other.

In a user namespace (a container, `PrivateUsers=`) all users that it does not map have one and the
same number, the overflow one, 65534: with it anybody could come back to anybody's session.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..backends.errors import PermissionDenied

OVERFLOW_UID = "65534"
"""Where the kernel does not say."""
_ALL = ["0", "0", "4294967295"]
"""The map of a process that is in no namespace: every number stands for itself."""


class Users:
    """What this process sees of the machine's users. *proc* is where the kernel says so."""

    def __init__(self, own: int | None = None, proc: Path = Path("/proc")):
        self.own = os.getuid() if own is None else own
        self.told_apart = _words(proc / "self" / "uid_map", _ALL) == _ALL
        """Whether every user has a number of his own here. An empty map names nobody; a kernel
        without namespaces has none.
        """
        self.overflow = int(_words(proc / "sys" / "kernel" / "overflowuid", [OVERFLOW_UID])[0])

    def check(self, uid: int) -> None:
        """Let a user be served.

        :raises PermissionDenied: he might be somebody else.
        """
        if self.told_apart:
            if uid == self.overflow != self.own:
                raise PermissionDenied(
                    f"user {uid} stands for all whom the kernel has no number for",
                    hint="connect as a user of this machine, or run a daemon of your own",
                )
        elif uid != self.own or uid == self.overflow:
            raise PermissionDenied(
                f"the daemon runs in a user namespace, where users cannot be told apart: it serves"
                f" none but its own ({self.own}), and you are {uid} there",
                hint="run it outside (PrivateUsers=no in the unit), or a daemon of your own",
            )


def _words(path: Path, otherwise: list[str]) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return otherwise

"""The uids by which the kernel can distinguish a connection's user from all others.

In a user namespace (a container, `PrivateUsers=`) all users without a mapping share one number, the
overflow uid, 65534. If it were accepted, any of them could resume any other's session.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..backends.errors import PermissionDenied

OVERFLOW_UID = "65534"
"""The overflow uid if the kernel does not report it."""
_IDENTITY_MAP = ["0", "0", "4294967295"]
"""The map of a process outside of user namespaces: each user has its own number."""


class Users:
    """The uids that this process can identify. *proc* is the proc file system."""

    def __init__(self, own: int | None = None, proc: Path = Path("/proc")):
        self.own = os.getuid() if own is None else own
        self.are_distinct = _words(proc / "self" / "uid_map", _IDENTITY_MAP) == _IDENTITY_MAP
        """Whether each user has its own number. A kernel without namespaces has no map."""
        self.overflow = int(_words(proc / "sys" / "kernel" / "overflowuid", [OVERFLOW_UID])[0])

    def check(self, uid: int) -> None:
        """Check that *uid* identifies one user.

        :raises PermissionDenied: other users may have the same number.
        """
        if self.are_distinct:
            if uid == self.overflow != self.own:
                raise PermissionDenied(
                    f"uid {uid} is shared by all users without a mapping in this user namespace",
                    hint="connect as a user of this machine, or run a daemon of your own",
                )
        elif uid != self.own or uid == self.overflow:
            raise PermissionDenied(
                f"the daemon runs in a user namespace that does not map all users: it serves only"
                f" its own ({self.own}), and you are {uid} there",
                hint="run it outside (PrivateUsers=no in the unit), or run a daemon of your own",
            )


def _words(path: Path, otherwise: list[str]) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return otherwise

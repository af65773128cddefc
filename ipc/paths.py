"""Default paths of the daemon's socket for clients and daemon, and a user's private folder in /tmp.

docs/protocol.md (*Transport*) describes the order; the clients in C and TypeScript have the same.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..backends.errors import PermissionDenied
from .peer import peer_of

SYSTEM_SOCKET = Path("/run/inferd/inferd.sock")
USERS_RUNTIME = Path("/run/user")
"""systemd makes a folder here for each user who is logged in."""
SHARED_FOLDER = Path("/tmp")
"""Any user can make a file here, under any name that no other file has yet."""
_HINT = "set INFERD_SOCKET or XDG_RUNTIME_DIR to a path that only you can change"


def client_socket_path(
    environ: Mapping[str, str] | None = None,
    system: Path = SYSTEM_SOCKET,
    *,
    runtime: Path = USERS_RUNTIME,
    shared: Path = SHARED_FOLDER,
) -> Path:
    """Return the socket to which a client without a path connects.

    It is `INFERD_SOCKET` if that is set. Otherwise it is the first socket that exists of those in
    the user's runtime folder, of the system, and in the user's private folder; if none exists, the
    one on which a daemon would listen.
    """
    environ = os.environ if environ is None else environ
    if environ.get("INFERD_SOCKET"):
        return Path(environ["INFERD_SOCKET"])
    private = private_socket(shared)
    for path in (*_runtime_sockets(environ, runtime), system, private):
        # A folder that another user has made may hold a socket of that user.
        if os.path.exists(path) and (path != private or _is_private(private.parent)):
            return path
    return daemon_socket_path(environ, system, runtime=runtime, shared=shared)


def daemon_socket_path(
    environ: Mapping[str, str] | None = None,
    system: Path = SYSTEM_SOCKET,
    *,
    runtime: Path = USERS_RUNTIME,
    shared: Path = SHARED_FOLDER,
) -> Path:
    """Return the socket on which a daemon without a configured path listens.

    It is `INFERD_SOCKET` if that is set, else in the user's runtime folder, else that of the system
    if its folder is there or can be made, else in the user's private folder.
    """
    environ = os.environ if environ is None else environ
    if environ.get("INFERD_SOCKET"):
        return Path(environ["INFERD_SOCKET"])
    for path in _runtime_sockets(environ, runtime):
        return path
    folder = system.parent
    if os.path.isdir(folder) or os.access(folder.parent, os.W_OK, effective_ids=True):
        return system
    return private_socket(shared)


def runtime_folder(environ: Mapping[str, str], users: Path = USERS_RUNTIME) -> Path | None:
    """Return the user's runtime folder: `XDG_RUNTIME_DIR`, or the one of systemd if it is there."""
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"])
    folder = users / str(os.geteuid())
    return folder if os.path.isdir(folder) else None


def _runtime_sockets(environ: Mapping[str, str], users: Path) -> Iterator[Path]:
    if folder := runtime_folder(environ, users):
        yield folder / "inferd" / "inferd.sock"


def private_socket(shared: Path = SHARED_FOLDER) -> Path:
    """Return the socket in the private folder of this user."""
    return shared / f"inferd-{os.geteuid()}" / "inferd.sock"


def make_private_folder(path: str, shared: Path = SHARED_FOLDER) -> None:
    """Make the private folder of this user, if the socket *path* is in it.

    :raises PermissionDenied: another user has made it, or can change it.
    :raises OSError: it cannot be made.
    """
    if _is_in_private_folder(path, shared):
        folder = os.path.dirname(path)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            _check_private(folder)


def check_socket_folder(path: str, shared: Path = SHARED_FOLDER) -> None:
    """Check, before a client connects to *path*, the user's private folder if the socket is in it.

    :raises PermissionDenied: another user has made it, or can change it.
    :raises FileNotFoundError: there is no such folder.
    """
    if _is_in_private_folder(path, shared):
        _check_private(os.path.dirname(path))


def check_server(sock: socket.socket, path: str, shared: Path = SHARED_FOLDER) -> None:
    """Check that the program at the other end of *sock* is this user's, if the socket *path* is in
    the user's private folder.

    :raises PermissionDenied: it is another user's.
    """
    if _is_in_private_folder(path, shared):
        uid = peer_of(sock).uid
        if uid != os.geteuid():
            message = f"the program that listens on {path} is of user {uid}"
            raise PermissionDenied(message, hint=_HINT)


def _is_in_private_folder(path: str, shared: Path) -> bool:
    return os.path.dirname(path) == str(private_socket(shared).parent)


def _is_private(folder: Path) -> bool:
    try:
        _check_private(str(folder))
    except (OSError, PermissionDenied):
        return False
    return True


def _check_private(folder: str) -> None:
    status = os.lstat(folder)  # a link leads to a folder that another user may change
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionDenied(f"{folder} is not a folder", hint=_HINT)
    if status.st_uid != os.geteuid():
        raise PermissionDenied(f"{folder} belongs to user {status.st_uid}", hint=_HINT)
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise PermissionDenied(
            f"{folder} is open to other users (mode {mode:04o})",
            hint=f"remove it: `rm -r {folder}`",
        )

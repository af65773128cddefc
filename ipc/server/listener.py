"""The daemon's listening socket, passed by systemd or bound to a path by the daemon, and the
accepting of connections, within their share of the event loop's time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager

import anyio

from ...backends.errors import Busy, InvalidArgument
from ..paths import make_private_folder
from .descriptors import ClientDescriptors
from .fairness import LoopTime

BACKLOG = 4096
"""Connections that wait to be accepted; further ones fail with EAGAIN. It is the usual upper limit
of the kernel (net.core.somaxconn).
"""
FD_FIRST = 3
FD_NAMES = ("inferd", "inferd.socket")


class InheritedListener:
    """A listening socket that systemd opened and keeps, so that its path stays, and connections
    wait in it while no daemon runs.
    """

    inherited = True

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.path = str(sock.getsockname())

    def remove(self) -> None:
        """Do nothing: the path belongs to systemd."""

    def close(self) -> None:
        """Close the daemon's descriptor of the socket."""
        self.socket.close()


def inherited_listener(environment: MutableMapping[str, str]) -> InheritedListener | None:
    """Return the socket that systemd passed to this process (`sd_listen_fds(3)`), or None.

    Removes systemd's variables from *environment*, so that child processes do not inherit them.

    :raises InvalidArgument: the socket is not a listening Unix stream socket; or systemd passed
        several sockets, and the number of those named for inferd is not one.
    """
    pid = environment.pop("LISTEN_PID", "")
    count, names = environment.pop("LISTEN_FDS", ""), environment.pop("LISTEN_FDNAMES", "")
    if pid != str(os.getpid()) or not count.isdecimal():
        return None
    numbers = range(FD_FIRST, FD_FIRST + int(count))
    for number in numbers:
        with contextlib.suppress(OSError):  # not a descriptor; `_open_listening` reports it
            os.set_inheritable(number, False)
    ours = _select_ours(numbers, names.split(":"))
    if len(ours) != 1:
        raise InvalidArgument(
            f"systemd passed {len(numbers)} sockets, {len(ours)} of them for inferd",
            hint="set one ListenStream=, or FileDescriptorName=inferd for inferd's socket",
        )
    return InheritedListener(_open_listening(ours[0]))


def _select_ours(numbers: Sequence[int], names: Sequence[str]) -> Sequence[int]:
    """Return the descriptors named for inferd; a single descriptor may have any name."""
    if len(numbers) == 1:
        return numbers
    return [number for number, name in zip(numbers, names, strict=False) if name in FD_NAMES]


def _open_listening(number: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=number)
        kind = sock.family, sock.type
        if kind == (socket.AF_UNIX, socket.SOCK_STREAM) and sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return sock
        found = f"{sock.family.name} {sock.type.name}"
    except OSError as exc:
        found = "it is closed" if exc.errno == errno.EBADF else str(exc.strerror)
    raise InvalidArgument(
        f"systemd passed something other than a listening Unix stream socket: {found}",
        hint="set ListenStream= to a path and Accept=no, as in systemd/user/inferd.socket",
    )


class UnixListener:
    """A listening socket at a path, with a mode and perhaps a group.

    `bind` replaces the socket of a daemon that has exited; `close` removes the path. Errors name
    the options of the daemon, or those of a *gateway*.
    """

    inherited = False

    def __init__(self, path: str, mode: int = 0o600, gid: int = -1, *, gateway: bool = False):
        self.path, self._mode, self._gid, self._gateway = path, mode, gid, gateway
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._identity: tuple[int, int] | None = None
        self._lock_fd = -1

    def bind(self, backlog: int = BACKLOG) -> None:
        """Bind and listen; replace a socket that refuses connections because its daemon has exited.

        :raises Busy: a daemon answers at the path.
        :raises InvalidArgument: the path cannot be used.
        :raises PermissionDenied: it is in this user's private folder, and another user can change
            the folder.
        """
        self._check_path()
        try:
            make_private_folder(self.path)
            self._make_folder(os.path.dirname(self.path))
            self._lock()
        except OSError as exc:
            hint = f"set XDG_RUNTIME_DIR to your own folder, /run/user/UID, or {self._other_path}"
            raise InvalidArgument(
                f"cannot listen on {self.path}: {exc.strerror or exc}",
                hint=self._other_path if self._gateway else hint,
            ) from None
        self._remove_stale_socket()
        old = os.umask(0o177)
        try:
            self.socket.bind(self.path)
        except OSError as exc:
            raise InvalidArgument(
                f"cannot listen on {self.path}: {exc.strerror or exc}",
                hint=self._other_path,
            ) from None
        finally:
            os.umask(old)
        status = os.stat(self.path)
        self._identity = (status.st_dev, status.st_ino)
        self._set_permissions()
        self.socket.listen(backlog)

    @property
    def _other_path(self) -> str:
        options = "--listen" if self._gateway else "--socket or INFERD_SOCKET"
        return f"choose another path with {options}"

    def _make_folder(self, folder: str) -> None:
        """Make the socket's folder, with access for the users who may use the socket."""
        if not os.path.isdir(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            os.chmod(folder, 0o755 if self._mode & 0o077 else 0o700)

    def _set_permissions(self) -> None:
        """Set the socket's group, then its mode; programs can connect only once it listens.

        :raises InvalidArgument: the daemon may not change them.
        """
        try:
            if self._gid >= 0:
                os.chown(self.path, -1, self._gid, follow_symlinks=False)
            os.chmod(self.path, self._mode)
        except OSError as exc:
            self.remove()
            raise InvalidArgument(
                f"cannot give {self.path} to the group {self._gid}: {exc.strerror}",
                hint="the daemon's user must be in the group socket-group; or let systemd make the"
                " socket (SocketGroup=)",
            ) from None

    def _lock(self) -> None:
        """Lock the file beside the socket, so that of two daemons that start at once one succeeds.

        :raises Busy: another process has the lock.
        """
        self._lock_fd = os.open(self.path + ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._in_use() from None

    def _in_use(self) -> Busy:
        if self._gateway:
            return Busy(
                f"another program already answers on {self.path}",
                hint=f"use it, or {self._other_path}",
            )
        return Busy(
            f"a daemon already answers on {self.path}",
            hint="use it, stop it with `inferd stop`, or choose another --socket",
        )

    def _check_path(self) -> None:
        """Check that no other file has the path, before a lock file is made beside it.

        :raises InvalidArgument: the path is that of a file which is not a socket.
        """
        try:
            mode = os.lstat(self.path).st_mode
        except OSError:
            return  # `bind` reports it
        if not stat.S_ISSOCK(mode):
            raise InvalidArgument(f"{self.path} exists and is not a socket", hint=self._other_path)

    def _remove_stale_socket(self) -> None:
        self._check_path()
        if not os.path.lexists(self.path):
            return
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            probe.connect(self.path)
        except ConnectionRefusedError:
            os.unlink(self.path)
        except OSError as exc:
            raise InvalidArgument(
                f"{self.path} exists and is not a daemon's socket: {exc.strerror or exc}",
                hint=f"remove it, or {self._other_path}",
            ) from None
        else:
            raise self._in_use()
        finally:
            probe.close()

    def close(self) -> None:
        """Close the socket, and remove the path if it is still this socket's."""
        self.socket.close()
        self.remove()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)

    def remove(self) -> None:
        """Remove the path if it is still this socket's."""
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) == self._identity:
                os.unlink(self.path)
                os.unlink(self.path + ".lock")
        except OSError:
            return  # already removed


ACCEPT_PAUSE_S = 0.1
ACCEPTS_AT_ONCE = 16
"""Connections served before other events are handled."""
ACCEPTING = -1
"""The user to whom the loop time of accepting is charged, because the user of a new connection is
not known yet.
"""
ACCEPTING_PAUSE_S = 0.03
"""Maximum time for which no connection is accepted because accepting has used up its share."""
CLOSED_AT_ONCE = 16
"""Maximum number of connections, closed by their clients, accepted for each one that is served."""
CLOSING_BACKLOG = 128
"""Closed connections that may still hold a descriptor each while more are accepted."""
CLOSING_PAUSE_S = 0.01


class Acceptor:
    """Accepts connections until it is stopped. Owned by the server, on the daemon's event loop.
    *note_failure* gets the errors of the system.
    """

    def __init__(
        self,
        descriptors: ClientDescriptors,
        loop_time: LoopTime,
        note_failure: Callable[[OSError], None],
    ):
        self._descriptors, self._loop_time = descriptors, loop_time
        self._note_failure = note_failure
        self._scope = anyio.CancelScope()

    def stop(self) -> None:
        """Leave new connections in the listening socket, for the next daemon to accept."""
        self._scope.cancel()

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time of the body to the share for new connections."""
        begin_s = time.thread_time()
        try:
            yield
        finally:
            self._loop_time.charge(ACCEPTING, time.thread_time() - begin_s)

    async def accept_connections(
        self, listener: socket.socket, serve: Callable[[socket.socket], object]
    ) -> None:
        """Call *serve* with each open connection, until `stop`."""
        with self._scope:
            while True:
                await anyio.wait_readable(listener)
                if self._descriptors.sockets_closing > CLOSING_BACKLOG:
                    await anyio.sleep(CLOSING_PAUSE_S)
                    continue
                if pause_s := self._loop_time.pause_s(ACCEPTING):
                    await anyio.sleep(min(pause_s, ACCEPTING_PAUSE_S))
                try:
                    with self.charged():
                        self._accept_some(listener, serve)
                except OSError as exc:  # no descriptors are left: wait until some are closed
                    self._note_failure(exc)
                    await anyio.sleep(ACCEPT_PAUSE_S)

    def _accept_some(
        self, listener: socket.socket, serve: Callable[[socket.socket], object]
    ) -> None:
        try:
            for _ in range(ACCEPTS_AT_ONCE):
                sock = accept_open(listener)
                if sock is not None:
                    serve(sock)
        except BlockingIOError:
            return  # all are accepted


def accept_open(listener: socket.socket) -> socket.socket | None:
    """Accept a connection that is still open; close those that their clients have closed. A client
    that connects and closes in a loop would otherwise fill the backlog faster than it is emptied.
    """
    for _ in range(CLOSED_AT_ONCE):
        sock, _ = listener.accept()
        sock.setblocking(False)
        try:
            is_open = bool(sock.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            is_open = True
        except OSError:
            is_open = False
        if is_open:
            return sock
        sock.close()  # nothing is unread, so no descriptor that could block is closed with it
    return None

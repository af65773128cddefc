"""The order of the sockets that clients and daemons use, and checks of a user's private folder."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import anyio
import pytest

from inferd import AsyncClient, Client
from inferd.backends.errors import ConnectionLost, InferdError, PermissionDenied
from inferd.cli.one_shot import OneShotClient
from inferd.ipc import paths
from inferd.ipc.server.listener import UnixListener
from tests.daemon.other_users import as_user
from tests.daemon.private_folder import OWN, SQUATTER, DaemonOfUser, folder_of, listening


class Machine:
    """Folders in place of /run and /tmp."""

    def __init__(self, folder: Path):
        self.run, self.tmp = folder / "run", folder / "tmp"
        self.run.mkdir()
        self.tmp.mkdir()
        self.system = self.run / "inferd" / "inferd.sock"
        self.named = folder / "named" / "inferd" / "inferd.sock"
        self.users = self.run / "user" / str(os.geteuid()) / "inferd" / "inferd.sock"
        self.private = self.tmp / f"inferd-{os.geteuid()}" / "inferd.sock"
        self.environ = {"XDG_RUNTIME_DIR": str(folder / "named")}

    def client(self, environ: Mapping[str, str]) -> Path:
        """Return the socket that a client finds."""
        places = {"runtime": self.run / "user", "shared": self.tmp}
        return paths.client_socket_path(environ, self.system, **places)

    def daemon(self, environ: Mapping[str, str]) -> Path:
        """Return the socket on which a daemon listens."""
        places = {"runtime": self.run / "user", "shared": self.tmp}
        return paths.daemon_socket_path(environ, self.system, **places)


def make(path: Path) -> None:
    """Make a file in place of a socket, in a folder of its user alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    path.touch()


@pytest.fixture
def machine() -> Iterator[Machine]:
    folder = Path(tempfile.mkdtemp(prefix="inferd-"))
    folder.chmod(0o711)  # other users reach what is in it, unlike in pytest's folders
    yield Machine(folder)
    shutil.rmtree(folder)


def test_a_named_socket_is_the_only_one(machine: Machine) -> None:
    environ = machine.environ | {"INFERD_SOCKET": "/x"}
    make(machine.named)
    assert machine.client(environ) == machine.daemon(environ) == Path("/x")


def test_clients_take_the_first_socket_that_exists(machine: Machine) -> None:
    for path in (machine.private, machine.system, machine.users):
        make(path)
        assert machine.client({}) == path
    assert machine.client(machine.environ) == machine.system, "another folder is named"
    make(machine.named)
    assert machine.client(machine.environ) == machine.named


def test_clients_expect_a_daemon_where_it_would_listen(machine: Machine) -> None:
    for environ in ({}, machine.environ):
        assert machine.client(environ) == machine.daemon(environ)
    assert machine.daemon({}) == machine.system, "root can make its folder"
    assert machine.daemon(machine.environ) == machine.named
    (machine.run / "user" / str(os.geteuid())).mkdir(parents=True)
    assert machine.client({}) == machine.daemon({}) == machine.users


def test_a_user_without_any_other_folder_has_a_private_one(machine: Machine) -> None:
    private = machine.tmp / f"inferd-{OWN}" / "inferd.sock"
    with as_user(OWN):
        assert machine.client({}) == machine.daemon({}) == private
    machine.system.parent.mkdir()
    with as_user(OWN):
        assert machine.client({}) == machine.daemon({}) == machine.system, "it is the service's"


@pytest.mark.parametrize("wrong", ["owner", "mode", "link"])
def test_a_private_folder_that_others_can_change_is_passed_over(
    machine: Machine, wrong: str
) -> None:
    make(machine.private)
    assert machine.client(machine.environ) == machine.private
    folder = machine.private.parent
    if wrong == "owner":
        os.chown(folder, SQUATTER, SQUATTER)
    elif wrong == "mode":
        folder.chmod(0o770)
    else:
        folder.symlink_to(folder.rename(machine.tmp / "elsewhere"))
    assert machine.client(machine.environ) == machine.named


# Connections of all clients to a socket in the private folder.


def connect_blocking(path: Path) -> None:
    with Client(path, connect_timeout=20):
        pass


def connect_async(path: Path) -> None:
    async def connect() -> None:
        async with AsyncClient(path, connect_timeout=20):
            pass

    anyio.run(connect)


def connect_command(path: Path) -> None:
    with OneShotClient(path):
        pass


Connect = Callable[[Path], None]
each_client = pytest.mark.parametrize("connect", [connect_blocking, connect_async, connect_command])


def refusal(connect: Connect, folder: Path) -> InferdError:
    """Return the error of a connection of `OWN` to the socket in its private folder."""
    with as_user(OWN), pytest.raises(InferdError) as raised:
        connect(folder / "inferd.sock")
    return raised.value


@pytest.mark.process
@each_client
def test_a_user_reaches_the_own_daemon_in_the_private_folder(connect: Connect) -> None:
    with folder_of(OWN) as folder, DaemonOfUser(), as_user(OWN):
        connect(folder / "inferd.sock")


@each_client
def test_a_program_in_a_folder_of_another_user_gets_no_connection(connect: Connect) -> None:
    with folder_of(SQUATTER, 0o777) as folder, listening(folder / "inferd.sock", SQUATTER) as sock:
        error = refusal(connect, folder)
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.accept()
    assert isinstance(error, PermissionDenied)
    assert f"{folder} belongs to user {SQUATTER}" in error.message
    assert "INFERD_SOCKET" in error.hint


@each_client
def test_a_program_of_another_user_in_the_own_folder_gets_no_hello(connect: Connect) -> None:
    with folder_of(OWN) as folder, listening(folder / "inferd.sock", SQUATTER) as listener:
        error = refusal(connect, folder)
        with listener.accept()[0] as accepted:
            assert accepted.recv(1) == b"", "the client has sent nothing"
    assert isinstance(error, PermissionDenied) and f"is of user {SQUATTER}" in error.message


@each_client
def test_a_folder_that_others_can_change_is_refused(connect: Connect) -> None:
    with folder_of(OWN, 0o711) as folder, listening(folder / "inferd.sock", OWN):
        error = refusal(connect, folder)
    assert isinstance(error, PermissionDenied) and "(mode 0711)" in error.message


@each_client
def test_a_link_in_place_of_the_folder_is_refused(connect: Connect, machine: Machine) -> None:
    link = Path(f"/tmp/inferd-{OWN}")
    link.symlink_to(machine.tmp)
    os.chown(link, OWN, OWN, follow_symlinks=False)
    os.chown(machine.tmp, OWN, OWN)
    try:
        with listening(machine.tmp / "inferd.sock", OWN):
            error = refusal(connect, link)
    finally:
        link.unlink()
    assert isinstance(error, PermissionDenied) and "is not a folder" in error.message


@each_client
def test_without_the_folder_no_daemon_answers(connect: Connect) -> None:
    assert isinstance(refusal(connect, Path(f"/tmp/inferd-{OWN}")), ConnectionLost)


def test_a_socket_elsewhere_may_be_of_any_user(machine: Machine) -> None:
    path = machine.tmp / "inferd.sock"
    with listening(path, SQUATTER), as_user(OWN), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        paths.check_socket_folder(str(path))
        paths.check_server(client, str(path))


# The daemon's end.


def test_a_daemon_makes_the_private_folder_and_finds_it_again(machine: Machine) -> None:
    folder = Path(f"/tmp/inferd-{OWN}")
    try:
        for _ in range(2):
            with as_user(OWN):
                listener = UnixListener(str(folder / "inferd.sock"), 0o666)
                listener.bind()
            assert folder.stat().st_mode & 0o777 == 0o700
            assert folder.stat().st_uid == OWN
            listener.close()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("owner", "mode"),
    [(SQUATTER, 0o777), (OWN, 0o777), (SQUATTER, 0o700)],
    ids=["open to all, another user's", "open to all", "another user's"],
)
def test_a_daemon_listens_in_no_folder_that_others_can_change(owner: int, mode: int) -> None:
    with folder_of(owner, mode) as folder:
        with as_user(OWN):
            listener = UnixListener(str(folder / "inferd.sock"))
            with pytest.raises(PermissionDenied, match=str(folder)):
                listener.bind()
        listener.close()
        assert list(folder.iterdir()) == []

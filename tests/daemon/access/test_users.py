"""The served users: those that the kernel can tell from each other."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from inferd.backends.errors import InferdError, PermissionDenied
from inferd.daemon.users import Users
from inferd.ipc.messages import PROTOCOL_VERSION, ClientHello, Limits, ServerHello
from inferd.ipc.server.connection import Request, ServerConnection
from inferd.ipc.server.server import Server
from inferd.testing import running_daemon
from tests.raw import RawClient

ALL = "         0          0 4294967295\n"
ONE = "         0       1000          1\n"
TWO = "0 0 1\n1000 1000 1\n"  # what PrivateUsers=yes makes


def users(tmp_path: Path, own: int, uid_map: str | None, overflow: str = "65534\n") -> Users:
    (tmp_path / "self").mkdir()
    (tmp_path / "sys" / "kernel").mkdir(parents=True)
    (tmp_path / "sys" / "kernel" / "overflowuid").write_text(overflow)
    if uid_map is not None:
        (tmp_path / "self" / "uid_map").write_text(uid_map)
    return Users(own, tmp_path)


@pytest.mark.parametrize(
    ("own", "uid_map", "served", "refused"),
    [
        (999, ALL, (0, 999, 1000, 65535), (65534,)),
        (65534, ALL, (0, 1000, 65534), ()),
        (999, None, (0, 999, 1000), (65534,)),
        (0, ONE, (0,), (1, 1000, 65534)),
        (1000, TWO, (1000,), (0, 65534)),
        (65534, "", (), (0, 1000, 65534)),
        (65534, ONE, (), (0, 1000, 65534)),
    ],
)
def test_users_that_are_served(
    own: int,
    uid_map: str | None,
    served: tuple[int, ...],
    refused: tuple[int, ...],
    tmp_path: Path,
) -> None:
    found = users(tmp_path, own, uid_map)
    for uid in served:
        found.check(uid)
    for uid in refused:
        with pytest.raises(PermissionDenied):
            found.check(uid)


def test_the_kernel_says_which_number_stands_for_the_rest(tmp_path: Path) -> None:
    found = users(tmp_path, 999, ALL, "99\n")
    found.check(65534)
    with pytest.raises(PermissionDenied, match="uid 99 is shared by all"):
        found.check(99)


class OnlyItsOwn:
    """A minimal handler of connections that serves *users*."""

    def __init__(self, users: Users):
        self.users = users
        self.causes: list[InferdError] = []

    def server_hello(self) -> ServerHello:
        return ServerHello(
            protocol=PROTOCOL_VERSION, software="x", instance=1, limits=Limits(*range(8))
        )

    def admit_connection(self, connection: ServerConnection) -> bool:
        self.users.check(connection.peer.uid)
        return False

    def may_begin_call(self, request: Request) -> bool:
        return False

    def begin_call(self, request: Request, end: Any) -> bool:
        raise AssertionError("no call may begin")

    def runs_at_once(self, request: Request) -> bool:
        return False

    def run_at_once(self, request: Request) -> Any:
        raise AssertionError(request.call)

    async def run_call(self, request: Request) -> Any:
        raise AssertionError("a refused connection has no calls")

    def connection_greeted(self, connection: ServerConnection, hello: ClientHello) -> None:
        return

    async def connection_delegated(self, connection: ServerConnection, hello: ClientHello) -> None:
        return

    def connection_ended(self, connection: ServerConnection) -> None:
        pass

    def connection_refused(self, connection: ServerConnection, error: InferdError) -> None:
        self.causes.append(error)

    def accept_failed(self, error: OSError) -> None:
        raise error

    def call_refused(self, call: str, error: InferdError) -> None:
        raise error

    def call_failed(self, operation: str, error: Exception) -> None:
        raise error


@pytest.mark.asyncio
async def test_a_refused_user_gets_the_cause_before_any_call(tmp_path: Path) -> None:
    handler = OnlyItsOwn(users(tmp_path, os.getuid() + 1, ONE))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        async with anyio.create_task_group() as group:
            await group.start(Server(handler, handler).serve, listener)
            reason = await anyio.to_thread.run_sync(goodbye, str(tmp_path / "sock"))
            group.cancel_scope.cancel()
    assert isinstance(reason, PermissionDenied)
    assert "PrivateUsers=no" in reason.hint
    assert [type(cause) for cause in handler.causes] == [PermissionDenied]


def goodbye(path: str) -> InferdError:
    with RawClient(path, hello=False) as client:
        return client.goodbye()


def test_the_daemon_s_own_user_is_served() -> None:
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        assert client.call("models")["models"]

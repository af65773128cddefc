"""Accepting connections, some of which their clients have closed already."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.ipc.server.listener import BACKLOG, CLOSED_AT_ONCE, UnixListener, accept_open
from tests.daemon.other_users import ADA, as_user
from tests.daemon.systemd_tools import SYSTEMD


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "sock"))
        sock.listen()
        sock.setblocking(False)
        yield sock


def connect(listener: socket.socket, stack: ExitStack) -> socket.socket:
    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    sock.connect(listener.getsockname())
    return sock


def test_closed_connections_are_passed_over(listener: socket.socket) -> None:
    with ExitStack() as stack:
        for _ in range(CLOSED_AT_ONCE - 1):
            connect(listener, stack).close()
        connect(listener, stack).send(b"hello")
        accepted = accept_open(listener)
        assert accepted is not None
        with accepted:
            assert accepted.recv(10) == b"hello", "nothing of it is lost"


def test_a_client_that_has_sent_nothing_yet_is_served(listener: socket.socket) -> None:
    with ExitStack() as stack:
        connect(listener, stack)
        accepted = accept_open(listener)
        assert accepted is not None
        accepted.close()


def test_other_events_are_handled_after_some_closed_connections(listener: socket.socket) -> None:
    with ExitStack() as stack:
        for _ in range(CLOSED_AT_ONCE + 1):
            connect(listener, stack).close()
        assert accept_open(listener) is None
        with pytest.raises(BlockingIOError):
            accept_open(listener)


def test_a_burst_of_clients_waits_to_be_accepted(tmp_path: Path) -> None:
    listener = UnixListener(str(tmp_path / "run" / "sock"))
    listener.bind()
    with ExitStack() as stack:
        stack.callback(listener.close)
        for _ in range(1000):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(listener.path)


@pytest.mark.parametrize("unit", sorted(SYSTEMD.rglob("*.socket")), ids=lambda p: p.parent.name)
def test_the_units_have_the_daemons_backlog(unit: Path) -> None:
    assert f"\nBacklog={BACKLOG}\n" in unit.read_text()


def test_a_folder_that_its_user_may_not_make_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "run" / "sock"
    listener = UnixListener(str(path))
    with as_user(ADA), pytest.raises(InvalidArgument, match=f"cannot listen on {path}") as raised:
        listener.bind()
    listener.close()
    assert "XDG_RUNTIME_DIR" in raised.value.hint and "--socket" in raised.value.hint


@pytest.mark.parametrize(("gateway", "option"), [(False, "--socket"), (True, "--listen")])
def test_a_path_in_use_names_the_programs_own_option(
    tmp_path: Path, gateway: bool, option: str
) -> None:
    (tmp_path / "file").write_text("a file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "other"))
        for name in ("file", "other"):
            listener = UnixListener(str(tmp_path / name), gateway=gateway)
            with pytest.raises(InvalidArgument, match="exists and is not") as caught:
                listener.bind()
            assert option in caught.value.hint
            listener.close()
            assert (tmp_path / name).exists()
    assert not (tmp_path / "file.lock").exists()

"""Accepting connections, some of which their clients have closed already."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from inferd.ipc.server.server import CLOSED_AT_ONCE, accept_open


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

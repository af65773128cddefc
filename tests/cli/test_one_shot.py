"""The blocking client of short commands, against daemons that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import (
    Busy,
    ConnectionLost,
    InferdError,
    ProtocolError,
    Timeout,
    VersionMismatch,
)
from inferd.cli.one_shot import OneShotClient
from inferd.ipc.messages import Kind
from inferd.wire.frames import pack_frame
from tests.ipc.fake_server import HELLO


@contextmanager
def daemon_that_sends(path: Path, *answers: bytes, close: bool = False) -> Iterator[Path]:
    """Run a daemon that sends one of *answers* for each message, then closes or stays silent."""
    done = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for answer in answers:
                connection.recv(1 << 16)
                connection.sendall(answer)
            if not close:
                done.wait(60)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield path
        finally:
            done.set()
            thread.join()


def hello(**changes: Any) -> bytes:
    return pack_frame((Kind.HELLO, HELLO | changes))


@pytest.mark.parametrize(
    ("answers", "close", "error"),
    [
        ((hello(protocol=[9, 1]),), False, VersionMismatch),
        ((b"\x01\x00\x00\x00\xc1",), False, ProtocolError),
        ((), True, ConnectionLost),
        ((pack_frame((Kind.GOODBYE, Busy("full").to_wire())),), False, Busy),
        ((hello(),), True, ConnectionLost),
        ((hello(),), False, Timeout),
        ((hello(), pack_frame((Kind.ERROR, 1, Busy("full").to_wire()))), False, Busy),
        ((hello(), pack_frame((Kind.REPLY, 1, {"models": 3}))), False, ProtocolError),
        ((hello() + pack_frame((Kind.GOODBYE, Busy("full").to_wire())),), False, Busy),
    ],
)
def test_a_daemons_failure_is_an_error_of_the_tree(
    answers: tuple[bytes, ...], close: bool, error: type[InferdError], tmp_path: Path
) -> None:
    with (
        daemon_that_sends(tmp_path / "s", *answers, close=close) as path,
        pytest.raises(error),
        OneShotClient(path) as client,
    ):
        if error is Timeout:
            client._timeout_s = 0.2
        client.models()


def test_a_daemon_that_sends_no_hello_times_out(tmp_path: Path) -> None:
    with (
        daemon_that_sends(tmp_path / "s") as path,
        pytest.raises(ConnectionLost, match=r"did not answer within 0\.2 s"),
        OneShotClient(path, timeout_s=0.2),
    ):
        pass


def test_a_full_backlog_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(path))
        listener.listen(0)
        first.connect(str(path))
        with (
            pytest.raises(ConnectionLost, match=r"did not answer within 0\.2 s"),
            OneShotClient(path, timeout_s=0.2),
        ):
            pass


def test_a_reply_in_two_pieces_is_read_whole(tmp_path: Path) -> None:
    frame = pack_frame((Kind.REPLY, 1, {"models": [{"name": "a"}]}))
    with (
        daemon_that_sends(tmp_path / "s", hello(), frame[:5]) as path,
        pytest.raises(Timeout),
        OneShotClient(path) as client,
    ):
        client._timeout_s = 0.2  # not that of the hello, which is late on a busy machine
        client.models()
    with (
        daemon_that_sends(tmp_path / "t", hello(), frame) as path,
        OneShotClient(path) as client,
    ):
        assert client.models() == [{"name": "a"}]

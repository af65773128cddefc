"""Descriptors whose sender decides how long an operation on them takes; and many descriptors."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from bench.attack.lingering import LingeringSockets
from inferd.backends.errors import Busy, InferdError
from inferd.testing import RunningDaemon
from inferd.wire.frames import READ_BYTES
from tests.attacks.silent_file import silent_file
from tests.daemon.other_users import ADA, BOB, as_user, client_of, daemon_for_all
from tests.echo import echo_model
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

LINGER_S = 30
CALLS = 20
CALLS_S_MAX = LINGER_S / 3
SURPLUS = 252
"""Descriptors of a message beside one more; the kernel allows 253."""


@contextmanager
def stopped(daemon: RunningDaemon) -> Iterator[None]:
    """Stop the daemon's process in the block, so that it finds everything sent there at once."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def make_calls(client: RawClient) -> None:
    """Make cheap calls, and check that the daemon's loop did not stand still meanwhile."""
    began_s = time.monotonic()
    for _ in range(CALLS):
        client.call("models")
    assert time.monotonic() - began_s < CALLS_S_MAX


def refuse_call(client: RawClient, fd: int) -> None:
    client.start_request("no_such_call", [fd])


def refuse_tensor(client: RawClient, fd: int) -> None:
    client.start_request("set_input", [fd], context=1, index=0, tensor={"fd": 0})


def close_connection(client: RawClient, fd: int) -> None:
    client.start_request("models", [fd])
    client.socket.close()


def pass_too_many(client: RawClient, fd: int) -> None:
    with open(os.devnull, "rb") as file:
        client.start_request("models", [*[file.fileno()] * SURPLUS, fd])


def leave_unread(client: RawClient, fd: int) -> None:
    """Send what ends the connection, and then a descriptor that the daemon never reads."""
    client.send_bytes(b"\xff" * 2 * READ_BYTES)
    client.start_request("models", [fd])
    client.socket.close()


WAYS = (refuse_call, refuse_tensor, close_connection, pass_too_many, leave_unread)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_lingering_socket_delays_only_its_sender(way: Callable[[RawClient, int], None]) -> None:
    with daemon_for_all() as daemon, LingeringSockets(LINGER_S) as sockets:
        ada, bob = client_of(daemon, ADA), client_of(daemon, BOB)
        with ada, bob:
            bob.call("models")
            with stopped(daemon), sockets.new_socket() as sock:
                way(ada, sock.fileno())
            make_calls(bob)


def open_descriptors(daemon: RunningDaemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def test_lingering_sockets_are_closed_long_before_their_time() -> None:
    """Otherwise each would occupy a descriptor of the daemon for as long as its sender wants."""
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_for_all())
        sockets = stack.enter_context(LingeringSockets(1000))
        bob = stack.enter_context(client_of(daemon, BOB))
        bob.call("models")
        before = open_descriptors(daemon)
        for _ in range(4):
            ada = client_of(daemon, ADA)
            with stopped(daemon), sockets.new_socket() as sock:
                leave_unread(ada, sock.fileno())
            with client_of(daemon, ADA) as ada, stopped(daemon), sockets.new_socket() as sock:
                refuse_call(ada, sock.fileno())
        wait_until(lambda: open_descriptors(daemon) <= before)
        make_calls(bob)


MANY = 400
"""Connections whose closes would take `INTERRUPT_S` each."""
MANY_S_MAX, ATTEMPTS = 1.5, 4
"""One short time is enough: other programs of the machine may delay some."""


def test_new_connections_do_not_wait_for_the_lingering_sockets_of_another_user() -> None:
    seconds = [_seconds_of_a_connection_beside_closes()]
    while seconds[-1] >= MANY_S_MAX and len(seconds) < ATTEMPTS:
        seconds.append(_seconds_of_a_connection_beside_closes())
    assert seconds[-1] < MANY_S_MAX, seconds


def _seconds_of_a_connection_beside_closes() -> float:
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_for_all())
        sockets = stack.enter_context(LingeringSockets(1000))
        with stopped(daemon), as_user(ADA):
            for _ in range(MANY):
                with (
                    socket.socket(socket.AF_UNIX) as ada,
                    sockets.new_socket() as lingering,
                ):
                    ada.connect(daemon.socket)
                    ada.sendall(b"\xff" * 2 * READ_BYTES)
                    socket.send_fds(ada, [b"\xff"], [lingering.fileno()])
        began_s = time.monotonic()
        with client_of(daemon, BOB) as bob:
            bob.call("models")
        return time.monotonic() - began_s


def test_a_tensor_that_cannot_be_read_delays_only_its_user() -> None:
    with daemon_for_all() as daemon, client_of(daemon, ADA) as ada, client_of(daemon, BOB) as bob:
        context, own = ada.context(), bob.context()
        with silent_file() as fd:
            tensor = {"fd": 0}
            ada.start_request("set_input", [fd], context=context, index=0, tensor=tensor)
            with os.fdopen(os.memfd_create("prompt"), "wb", buffering=0) as file:
                file.write(b"hello")
                bob.call("set_input", [file.fileno()], context=own, index=0, tensor=tensor)
            bob.call("compute", context=own)
            assert bob.output(own) == b"hello"
            make_calls(bob)
            assert ada.call("models"), "calls without a descriptor go on"


def test_a_model_file_that_cannot_be_read_delays_only_its_user() -> None:
    """The start of another worker closes the file, too, in the child between fork and exec."""
    config = echo_model("other")
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_for_all(config))
        ada = stack.enter_context(client_of(daemon, ADA))
        bob = stack.enter_context(client_of(daemon, BOB))
        fd = stack.enter_context(silent_file())
        ada.start_request("load", [fd], builders=[], fd=0)
        make_calls(bob)
        bob.context("other")
        make_calls(bob)


def memory_file() -> int:
    fd = os.memfd_create("tensor")
    os.write(fd, b"x")
    return fd


def inputs_of(fds: list[int]) -> list[Any]:
    return [[f"input-{number}", {"fd": 0}] for number, _ in enumerate(fds)]


def test_waiting_calls_do_not_exhaust_the_descriptors() -> None:
    config = echo_model("slow", step_ms=200, slots=1) + echo_model("other")
    with daemon_for_all(config) as daemon, client_of(daemon, ADA) as ada:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        fds = [memory_file() for _ in range(15)]
        graph = ada.call("load_by_name", name="slow")["graph"]
        contexts = [
            int(ada.call("init_execution_context", graph=graph)["context"]) for _ in range(66)
        ]
        for number, context in enumerate(contexts):
            ada.start_request("compute", fds, context=context, inputs=inputs_of(fds))
            if number % 16 == 15:  # faster than they are read, the user would get `Busy`
                wait_until(lambda: open_descriptors(daemon) < 256)
        for fd in fds:
            os.close(fd)
        ada.call("models")
        with client_of(daemon, BOB) as bob:
            bob.context("other")
            make_calls(bob)
        assert open_descriptors(daemon) < 512


def test_calls_with_more_descriptors_than_a_user_may_hold_are_refused() -> None:
    config = "descriptors-user-max = 32\n"
    with daemon_for_all(config) as daemon, silent_file() as silent:
        ada, bob = client_of(daemon, ADA), client_of(daemon, BOB)
        with ada, bob:
            context, own = ada.context(), bob.context()
            fds = [silent, *[memory_file() for _ in range(15)]]
            waiting = [
                ada.start_request("compute", fds, context=context, inputs=inputs_of(fds))
                for _ in range(2)
            ]
            with pytest.raises(Busy, match="descriptors") as refused:
                ada.call("compute", fds, context=context, inputs=inputs_of(fds))
            assert refused.value.data["descriptors_user_max"] == 32
            bob.call("compute", fds[1:], context=own, inputs=inputs_of(fds[1:]))
            assert not any(map(ada.has_answer, waiting))
            for fd in fds[1:]:
                os.close(fd)


def test_a_user_whose_descriptors_stay_open_cannot_pass_more() -> None:
    config = "descriptors-user-max = 16\n"
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_for_all(config))
        silent = stack.enter_context(silent_file())
        bob = stack.enter_context(client_of(daemon, BOB))
        bob.call("models")
        before = open_descriptors(daemon)
        for _ in range(5):
            with client_of(daemon, ADA) as ada:
                try:
                    ada.start_request("models", [silent] * 253)
                    ada.goodbye()
                except (Closed, InferdError, OSError):
                    continue  # refused at once
        assert open_descriptors(daemon) < before + 3 * 253
        make_calls(bob)


def test_the_daemon_raises_its_limit_of_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with daemon_for_all() as daemon:
            assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, soft_before)

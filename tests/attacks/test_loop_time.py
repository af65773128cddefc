"""The requests of one user do not keep the daemon busy while another user's turn runs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from inferd.backends.errors import InferdError
from inferd.ipc.messages import Kind
from inferd.testing import RunningDaemon
from inferd.wire.frames import pack_frame
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.raw import RawClient

MEASURED_S = 1.0
CORES_MAX = 0.3
"""The bound is a tenth of a core and 50 ms; without it, the daemon uses a whole core."""

CANCEL = 2000
COSTLY = "[" + "1," * 40_000 + "1]"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all() as running:
        yield running


def many_calls(client: RawClient) -> None:
    """Send cheap calls as fast as the daemon answers them."""
    for number in [client.start_request("stats") for _ in range(200)]:
        client.wait_result(number)


def costly_calls(client: RawClient) -> None:
    """Send calls that take long to check."""
    with contextlib.suppress(InferdError):
        client.call("init_backend", config=COSTLY)


def connections(client: RawClient) -> None:
    """Connect and close."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(client.socket.getpeername())


@pytest.mark.parametrize("attack", [many_calls, costly_calls, connections])
def test_requests_take_a_small_part_of_a_core_beside_a_turn(
    daemon: RunningDaemon, attack: Callable[[RawClient], None]
) -> None:
    process = psutil.Process(daemon.pid)
    with client_of(daemon, ADA) as ada, client_of(daemon, BOB) as bob:
        bob.start_request("stream", context=bob.context(), prompt="hello", credit=1)
        began_s, before_s = time.monotonic(), _cpu_s(process)
        while time.monotonic() < began_s + MEASURED_S:
            attack(ada)
        used_s = _cpu_s(process) - before_s
        assert used_s / (time.monotonic() - began_s) < CORES_MAX


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def test_a_user_cancels_a_turn_though_many_requests_of_the_user_wait(
    daemon: RunningDaemon,
) -> None:
    with client_of(daemon, ADA) as ada:
        turn = ada.start_request("stream", context=ada.context(), prompt="hello", credit=1)
        requests = [[1, number, "stats", {}] for number in range(1000, 1200)]
        requests.append([1, CANCEL, "cancel", {"request": turn}])
        ada.send_bytes(b"".join(map(pack_frame, requests)))
        order: list[int] = []
        while len(order) < len(requests) + 1:
            kind, number, *_ = ada.read_message()
            if kind in (Kind.REPLY, Kind.ERROR):
                order.append(number)
        assert max(order.index(CANCEL), order.index(turn)) < len(order) / 2

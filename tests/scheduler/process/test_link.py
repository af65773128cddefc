"""The worker's end of the socket pair."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from inferd.backends.errors import LoadFailed
from inferd.scheduler import messages as m
from inferd.scheduler.worker import READS_MAX, SocketLink
from inferd.wire.frames import ANY_LENGTH, READ_BYTES, FrameReader, pack_frame

SELECT_MAX = 1024
"""`select` rejects descriptors from this number on (FD_SETSIZE)."""
MUCH = m.ModelNotLoaded(LoadFailed("x" * (1 << 20)).to_wire())
"""More than the socket accepts at once."""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The daemon's end, and the worker's under a number that `select` rejects."""
    settings = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(settings[0], SELECT_MAX + 100), settings[1]))
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(fileno=high(theirs.fileno())) as worker:
        theirs.close()
        yield ours, worker
    resource.setrlimit(resource.RLIMIT_NOFILE, settings)


def high(fd: int) -> int:
    """Return a duplicate of *fd* whose number `select` rejects."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SELECT_MAX)


def test_a_link_receives_on_a_high_descriptor_number(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    daemon, worker = pair
    link = SocketLink(worker)
    assert link.receive_commands(0.01) == []
    daemon.sendall(pack_frame([m.Credit(3, 4)]))
    assert link.receive_commands(None) == [m.Credit(3, 4)]


def test_a_link_is_woken_by_a_high_descriptor_number(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    link = SocketLink(pair[1])
    event = high(woken := os.eventfd(1))
    link.wake_on(event)
    assert link.receive_commands(None) == []
    os.close(event)
    os.close(woken)


def test_a_link_drains_on_a_high_descriptor_number(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    daemon, worker = pair
    link, frames = SocketLink(worker), FrameReader(ANY_LENGTH)
    daemon.settimeout(60)
    link.send_reports([MUCH])
    link.drain(0.01)  # without a reader it returns after the timeout
    found: list[bytes] = []
    while not found:
        found += frames.read_frames(daemon.recv(1 << 16))
        link.drain(0.01)
    assert msgspec.msgpack.decode(found[0], type=list[m.Report]) == [MUCH]


def test_a_link_receives_a_bounded_amount_at_a_time(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    daemon, worker = pair
    link, frame = SocketLink(worker), pack_frame([m.Credit(1, 2)])
    data, received = frame * (2 * READS_MAX * READ_BYTES // len(frame)), list[int]()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(daemon.sendall, data)
        while sum(received) < len(data) // len(frame):
            received.append(len(link.receive_commands(None)))
        sending.result()
    assert max(received) <= READS_MAX * READ_BYTES // len(frame) + 1

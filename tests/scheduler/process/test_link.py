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
from tests.processes import open_descriptors

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
    link, frame = SocketLink(worker), pack_frame([m.Detokenize(1, bytes(1000))])
    data, received = frame * (2 * READS_MAX * READ_BYTES // len(frame)), list[int]()
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(daemon.sendall, data)
        while sum(received) < len(data) // len(frame):
            received.append(len(link.receive_commands(None)))
        sending.result()
    assert max(received) <= READS_MAX * READ_BYTES // len(frame) + 1


def descriptor() -> int:
    return os.memfd_create("item", os.MFD_CLOEXEC)


def same_file(a: int, b: int) -> bool:
    return os.path.sameopenfile(a, b)


def test_embeddings_come_with_their_descriptors_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    daemon, worker = pair
    link, sent = SocketLink(worker), [descriptor() for _ in range(3)]
    frame = pack_frame([m.MediaReady(b"1"), m.Cancel(1), m.MediaReady(b"2")])
    socket.send_fds(daemon, [frame[:5]], sent[:2])
    assert link.receive_commands(0.01) == []
    daemon.sendall(frame[5:])
    one, _, two = link.receive_commands(None)
    socket.send_fds(daemon, [pack_frame([m.MediaReady(b"3")])], sent[2:])
    [three] = link.receive_commands(None)
    received = []
    for command in (one, two, three):
        assert isinstance(command, m.MediaReady)
        received.append(command.fd)
    assert all(map(same_file, received, sent)) and not set(received) & set(sent)
    for fd in (*received, *sent):
        os.close(fd)


def test_embeddings_without_a_descriptor_and_a_descriptor_without_embeddings(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """No number from the frame is taken for a descriptor, and none stays open."""
    daemon, worker = pair
    link, sent = SocketLink(worker), descriptor()
    daemon.sendall(pack_frame([m.MediaReady(b"1", fd=worker.fileno())]))
    [command] = link.receive_commands(None)
    assert isinstance(command, m.MediaReady) and command.fd == -1
    before = len(open_descriptors())
    socket.send_fds(daemon, [pack_frame([m.Cancel(1)])], [sent])
    assert link.receive_commands(None) == [m.Cancel(1)]
    assert len(open_descriptors()) == before and not link.descriptors
    os.close(sent)

"""Frames with descriptors between two processes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from inferd.backends.fd_frames import (
    DESCRIPTORS_MAX,
    FRAME_BYTES_MAX,
    BrokenFrame,
    FrameReader,
    close_all,
    read_with_descriptors,
    send_frame,
)
from tests.processes import open_descriptors

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def test_descriptors_arrive_with_their_frame(pair: Pair) -> None:
    left, right = pair
    fds = [memory(b"one"), memory(b"two")]
    send_frame(left, b"plain")
    send_frame(left, b"with", fds)
    send_frame(left, b"after")
    close_all(fds)
    reader = FrameReader(right)
    assert reader.receive() == (b"plain", [])
    body, found = reader.receive()
    assert body == b"with"
    assert [os.pread(fd, 10, 0) for fd in found] == [b"one", b"two"]
    assert not any(os.get_inheritable(fd) for fd in found)
    close_all(found)
    assert reader.receive() == (b"after", [])


def test_a_frame_larger_than_the_socket_buffers_arrives_whole(pair: Pair) -> None:
    left, right = pair
    content, fd = os.urandom(3 << 20), memory(b"x")
    sender = threading.Thread(target=send_frame, args=(left, content, [fd]))
    sender.start()
    body, found = FrameReader(right).receive()
    sender.join()
    assert body == content and len(found) == 1
    close_all([*found, fd])


def test_the_end_of_the_other_side_is_an_empty_body_and_closes_descriptors(pair: Pair) -> None:
    left, right = pair
    fd = memory(b"x")
    before = open_descriptors()
    socket.send_fds(left, [b"\x05\x00\x00\x00ab"], [fd])
    left.shutdown(socket.SHUT_WR)
    assert FrameReader(right).receive() == (b"", [])
    assert open_descriptors() == before
    close_all([fd])


def test_too_large_frames_and_too_many_descriptors_are_broken(pair: Pair) -> None:
    left, right = pair
    left.sendall((FRAME_BYTES_MAX + 1).to_bytes(4, "little"))
    with pytest.raises(BrokenFrame):
        FrameReader(right).receive()
    fds = [memory(b"x") for _ in range(DESCRIPTORS_MAX + 1)]
    before = open_descriptors()
    socket.send_fds(left, [b"\x01\x00\x00\x00a"], fds)
    with pytest.raises(BrokenFrame):
        FrameReader(right).receive()
    assert open_descriptors() == before
    close_all(fds)


def test_descriptors_that_arrive_are_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_inheritable(theirs.fileno(), True)
        socket.send_fds(theirs, [b"data"], [theirs.fileno(), ours.fileno()])
        data, descriptors, flags = read_with_descriptors(ours, 100, 2)
        inherited = [os.get_inheritable(descriptor) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
    assert (data, inherited, flags & socket.MSG_CTRUNC) == (b"data", [False, False], 0)


def test_descriptors_without_room_are_reported() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [b"data"], [theirs.fileno(), ours.fileno()])
        data, [descriptor], flags = read_with_descriptors(ours, 100, 1)
        os.close(descriptor)
    assert (data, bool(flags & socket.MSG_CTRUNC)) == (b"data", True)


def test_flags_are_followed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(BlockingIOError):
        read_with_descriptors(ours, 100, 1, socket.MSG_DONTWAIT)

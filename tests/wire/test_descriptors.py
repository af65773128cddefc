"""Reading of descriptors that arrive with data."""

from __future__ import annotations

import os
import socket

import pytest

from inferd.wire.descriptors import read_with_descriptors


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

"""The credentials of the peer, as the kernel reports them."""

from __future__ import annotations

import os
import socket

from inferd.ipc.peer import peer_of


def test_a_peer_has_the_numbers_and_groups_of_its_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = peer_of(ours)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert peer.groups == frozenset(os.getgroups())

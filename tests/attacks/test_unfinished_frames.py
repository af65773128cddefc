"""Frames that never end, and clients that never read, beside another user."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import psutil
import pytest

from inferd.backends.errors import ModelNotFound
from inferd.ipc.server.server import INCOMPLETE_BYTES_MAX
from inferd.testing import RunningDaemon
from inferd.wire.frames import FRAME_BYTES_MAX
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.raw import RawClient
from tests.waiting import wait_until

CONNECTIONS = 150
HEAD = struct.pack("<I", FRAME_BYTES_MAX)
BODY = bytes(FRAME_BYTES_MAX - 1)
SPARE_BYTES = 48 << 20
"""Growth of a daemon that is not attacked, with what the allocator keeps."""


def rss_bytes(daemon: RunningDaemon) -> int:
    return int(psutil.Process(daemon.pid).memory_info().rss)


def send_what_is_accepted(sockets: Sequence[socket.socket], victim: RawClient) -> int:
    """Send an unfinished frame over each socket until the daemon reads no more; return the bytes
    sent. The victim's calls show that the daemon has handled what had arrived.
    """
    frame = HEAD + BODY
    sent = dict.fromkeys(sockets, 0)
    for sock in sockets:
        sock.setblocking(False)
    while True:
        before = sum(sent.values())
        for sock in sockets:
            try:
                sent[sock] += sock.send(memoryview(frame)[sent[sock] :])
            except BlockingIOError:
                continue
        assert victim.call("models")
        if sum(sent.values()) == before:
            return before


def test_unfinished_frames_of_one_user_are_bounded_and_delay_nobody_else() -> None:
    with daemon_for_all() as daemon, ExitStack() as stack:
        victim = stack.enter_context(client_of(daemon, BOB))
        adas = [stack.enter_context(client_of(daemon, ADA)) for _ in range(CONNECTIONS)]
        before = rss_bytes(daemon)
        sent = send_what_is_accepted([ada.socket for ada in adas], victim)
        grown = rss_bytes(daemon) - before
        assert grown < INCOMPLETE_BYTES_MAX // 2 + SPARE_BYTES, f"{sent >> 20} MiB were sent"

        with pytest.raises(ModelNotFound):  # the whole frame has arrived
            victim.call("load", builders=[bytes(FRAME_BYTES_MAX - 100)])


def test_memory_of_unfinished_frames_is_returned() -> None:
    with daemon_for_all() as daemon, client_of(daemon, BOB) as victim:
        rss = list[int]()
        for _ in range(4):
            with ExitStack() as stack:
                adas = [stack.enter_context(client_of(daemon, ADA)) for _ in range(100)]
                send_what_is_accepted([ada.socket for ada in adas], victim)
            with client_of(daemon, 0) as root:
                wait_until(lambda: root.call("stats")["stats"]["connections"] <= 2)
            rss.append(rss_bytes(daemon))
        assert rss[-1] - rss[0] < SPARE_BYTES // 6, rss


def test_large_frames_of_one_user_all_arrive_though_they_exceed_the_bound_together() -> None:
    with daemon_for_all() as daemon, ExitStack() as stack:
        count = INCOMPLETE_BYTES_MAX // FRAME_BYTES_MAX
        adas = [stack.enter_context(client_of(daemon, ADA)) for _ in range(count)]
        params = {"builders": [bytes(FRAME_BYTES_MAX - 100)]}
        answers: list[object] = []

        def call(client: RawClient) -> None:
            client.start_request("load", **params)
            answers.append(client.read_message())

        threads = [threading.Thread(target=call, args=(ada,)) for ada in adas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(answers) == count

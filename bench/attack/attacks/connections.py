"""Attacks with connections: idle ones, many new ones, unfinished frames, replies never read."""

from __future__ import annotations

import itertools
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from bench.attack.attack import Attack, Target, run_at_once
from inferd.wire.frames import FRAME_BYTES_MAX, pack_frame

CONNECTIONS = 300
FLOODING_THREADS = 8
UNFINISHED_CONNECTIONS = 100
UNFINISHED = struct.pack("<I", FRAME_BYTES_MAX) + bytes(FRAME_BYTES_MAX - 1)
SLOW_PAUSE_S = 1.0
UNREAD_CONNECTIONS = 50
HELLO = pack_frame([0, {"protocol": [1, 0], "software": "attack"}])


def _connect(target: Target) -> socket.socket | None:
    """Return a connection that has exchanged the hellos, or None if the daemon refuses it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5.0)
    try:
        sock.connect(target.socket)
        sock.sendall(HELLO)
        sock.recv(4096)
    except OSError:
        sock.close()
        return None
    sock.setblocking(False)
    return sock


def _is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(65536) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _hold_connections(
    target: Target, count: int, use: Callable[[socket.socket], Any] = lambda _: None
) -> None:
    """Keep *count* connections open, or as many as the daemon allows, and *use* each in turn."""
    held: list[socket.socket] = []
    while not target.is_over():
        if len(held) < count and (sock := _connect(target)):
            held.append(sock)
        else:
            time.sleep(0.01)
        for sock in tuple(held):
            try:
                use(sock)
            except BlockingIOError:
                continue
            except OSError:
                held.remove(sock)
                sock.close()


def _drop_if_closed(sock: socket.socket) -> None:
    if _is_closed(sock):
        raise ConnectionResetError


def hold_idle_connections(target: Target) -> None:
    """Keep as many connections open as the daemon allows, without a request."""
    _hold_connections(target, CONNECTIONS, _drop_if_closed)


def connect_often(target: Target) -> None:
    """Connect and close as fast as possible, in several threads."""

    def flood(_: Target) -> None:
        while not target.is_over():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(target.socket)

    run_at_once(target, [flood] * FLOODING_THREADS)


def send_unfinished_frames(target: Target) -> None:
    """Announce the largest frame on many connections, send nearly all of it, and close."""
    while not target.is_over():
        socks = [sock for _ in range(UNFINISHED_CONNECTIONS) if (sock := _connect(target))]
        unsent = dict.fromkeys(socks, memoryview(UNFINISHED))
        ends_at_s = time.monotonic() + 0.5
        while any(unsent.values()) and time.monotonic() < ends_at_s:
            for sock in socks:
                try:
                    unsent[sock] = unsent[sock][sock.send(unsent[sock]) :]
                except BlockingIOError:
                    continue  # the daemon does not read it now
                except OSError:
                    unsent[sock] = memoryview(b"")  # the daemon refused it
        for sock in socks:
            sock.close()


def send_slowly(target: Target) -> None:
    """Announce the largest frame on many connections, and send one byte a second."""
    begun: dict[socket.socket, float] = {}

    def send_next(sock: socket.socket) -> None:
        now_s = time.monotonic()
        if now_s >= begun.get(sock, 0.0) + SLOW_PAUSE_S:
            sock.send(b"\x00" if sock in begun else UNFINISHED[:4])
            begun[sock] = now_s

    _hold_connections(target, CONNECTIONS, send_next)


def leave_replies_unread(target: Target) -> None:
    """Send requests on many connections as long as the daemon reads them, and read nothing."""
    numbers = itertools.count(1)

    def request(sock: socket.socket) -> None:
        sock.send(pack_frame([1, next(numbers), "stats", {}]))

    _hold_connections(target, UNREAD_CONNECTIONS, request)


ATTACKS = (
    Attack("idle-connections", "300 idle connections", hold_idle_connections,
           ("calls", "places")),
    Attack("connection-flood", "Connecting in 8 threads, without a pause", connect_often,
           ("share", "calls", "places")),
    Attack("unfinished-frames", "100 frames of the largest size, never finished",
           send_unfinished_frames, ("share", "calls", "memory")),
    Attack("slow-senders", "300 frames at one byte a second", send_slowly, ("calls", "places")),
    Attack("unread-replies", "50 connections that read no reply", leave_replies_unread,
           ("share", "calls", "memory")),
)  # fmt: skip

"""Attacks with connections: many idle ones, and frames that never end."""

from __future__ import annotations

import socket
import struct
import time

from bench.attack.attack import Attack, Target

CONNECTIONS = 300
UNFINISHED_CONNECTIONS = 30
UNFINISHED_BYTES = 8 << 20


def _connect(target: Target) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(5.0)
    try:
        sock.connect(target.socket)
        sock.recv(4096)
    except OSError:
        sock.close()
        return None
    return sock


def hold_idle_connections(target: Target) -> None:
    """Keep as many connections open as the daemon allows, without a request."""
    held: list[socket.socket] = []
    while not target.is_over():
        if len(held) < CONNECTIONS and (sock := _connect(target)):
            held.append(sock)
        else:
            time.sleep(0.01)
            held = [s for s in held if not _is_closed(s)]


def _is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(65536) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def send_unfinished_frames(target: Target) -> None:
    """Announce the largest frame on many connections, send nearly all of it, and close."""
    head, body = struct.pack("<I", UNFINISHED_BYTES), b"\x00" * (UNFINISHED_BYTES - 1)
    while not target.is_over():
        socks = [sock for _ in range(UNFINISHED_CONNECTIONS) if (sock := _connect(target))]
        for sock in socks:
            try:
                sock.sendall(head + body)
            except OSError:
                continue  # the daemon refused the frame
        for sock in socks:
            sock.close()


ATTACKS = (
    Attack("idle-connections", "300 idle connections", hold_idle_connections),
    Attack("unfinished-frames", "30 frames of 8 MiB, never finished", send_unfinished_frames),
)

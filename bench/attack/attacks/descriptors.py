"""Attacks with descriptors: sockets whose close waits, and as many as the daemon keeps."""

from __future__ import annotations

import os
import socket
import struct
import time

import msgspec

from bench.attack.attack import Attack, Target
from bench.attack.lingering import LingeringSockets

LINGER_S = 1000
MESSAGE_DESCRIPTORS = 253
HELD_CONNECTIONS = 100
UNCLAIMED = 16
"""Descriptors that a connection may pass before a call claims them."""
_HELLO = [0, {"protocol": [1, 0], "software": "attack"}]


def _connect(target: Target) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(1.0)
    try:
        sock.connect(target.socket)
        sock.sendall(_frame(_HELLO))
    except OSError:
        sock.close()
        return None
    return sock


def _frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def pass_lingering_sockets(target: Target) -> None:
    """Pass sockets whose last close waits, in refused calls and on connections that close."""
    refused = _frame([1, 1, "no_such_call", {}])
    with LingeringSockets(LINGER_S) as sockets:
        while not target.is_over():
            with sockets.new_socket() as sock:
                for count in (1, MESSAGE_DESCRIPTORS):
                    connection = _connect(target)
                    if connection is None:
                        continue
                    with connection:
                        _send(connection, refused, [sock.fileno()] * count)
                        _send(connection, refused, [sock.fileno()])


def _send(connection: socket.socket, data: bytes, descriptors: list[int]) -> None:
    try:
        socket.send_fds(connection, [data], descriptors)
    except OSError:
        time.sleep(0.001)  # the daemon has closed the connection, or too many are in flight


def hold_descriptors(target: Target) -> None:
    """Pass as many descriptors as the daemon keeps, on many connections, and call nothing."""
    held: list[socket.socket] = []
    with open(os.devnull, "rb") as file:
        while not target.is_over():
            connection = _connect(target) if len(held) < HELD_CONNECTIONS else None
            if connection is None:
                time.sleep(0.05)
                continue
            _send(connection, b"\0", [file.fileno()] * UNCLAIMED)
            held.append(connection)


ATTACKS = (
    Attack("lingering-sockets", "Sockets whose close waits", pass_lingering_sockets,
           ("gap", "calls")),
    Attack("held-descriptors", "1600 descriptors that no call claims", hold_descriptors,
           ("calls", "places")),
)  # fmt: skip

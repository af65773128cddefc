"""The connections between entries and relays: their messages, times and sockets' options.

A data connection carries the frames of the protocol unchanged, in both directions. A report
connection carries frames of the relay alone, each an array whose first item is its kind::

    [0, hello]    the daemon's hello, after each connect of the relay to it
    [1, load]     the node's load
    [2]           ping: the relay lives
    [3, error]    the daemon cannot be reached
"""

from __future__ import annotations

import socket
from enum import IntEnum

REPORT_S = 0.2
"""Interval of reports: the largest age of a load in routing, except on an overloaded daemon."""
PING_S = 2.0
"""Interval of pings: of the relay's on a report connection, and of the kernel's on all."""
LOST_S = 6.0
"""Time without a sign of life after which the other side is lost."""
HANDSHAKE_S_MAX = 10.0
BUFFER_BYTES = 1 << 18
"""Data that waits for a slow reader before its sender is no longer read."""
_PROBES = 2


class ReportKind(IntEnum):
    """The first item of a frame on a report connection."""

    HELLO = 0
    LOAD = 1
    PING = 2
    DAEMON_LOST = 3


def set_options(sock: socket.socket) -> None:
    """Send small frames at once, and have the kernel close the connection `LOST_S` after the other
    machine has vanished, whether or not data is under way.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(PING_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(PING_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_S))

"""The connections between entries and relays: addresses, messages, times, options of sockets.

A data connection carries the frames of the protocol unchanged, in both directions. The content of a
tensor in a descriptor is sent to the relay before its request, which the relay passes to the daemon
with descriptors of new memfds::

    [100, data]     a part of a content
    [101]           the end of a content
    [102, request]  a request, as bytes, with the contents before it
    [103]           the contents so far are dropped
    [104, token]    a content that was passed to the relay's own socket with this token

A report connection carries frames of the relay alone, each an array whose first item is its kind::

    [0, hello]    the daemon's hello, after each connect of the relay to it
    [1, load]     the node's load
    [2]           ping: the relay lives
    [3, error]    the daemon cannot be reached
"""

from __future__ import annotations

import socket
from enum import IntEnum
from typing import NamedTuple

from ...backends.errors import InvalidArgument
from ...ipc.server.listener import BACKLOG

REPORT_S = 0.2
"""Interval of reports, and so the maximum age of a load in routing, if no daemon is overloaded."""
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


class ContentKind(IntEnum):
    """The first item of a frame on a data connection that the relay does not pass on. In msgpack
    it is one byte, which is not a message kind of the protocol.
    """

    PART = 100
    END = 101
    REQUEST = 102
    DROP = 103
    PASSED = 104


TOKEN_BYTES = 16
RECEIVED, REFUSED = b"\1", b"\0"
"""The relay's answers to a descriptor that is passed to its own socket."""
PART_BYTES = 1 << 18
"""Bytes of a part of a content."""
CONTENTS_MAX = 16
"""Maximum contents of a request: as many as the descriptors that a daemon queues for one."""
CONTENTS_BYTES_MAX = 32 << 20
"""Bytes of the contents of a request together."""


def set_options(sock: socket.socket) -> None:
    """Send small frames at once, and make the kernel close the connection `LOST_S` after the other
    machine has vanished, whether or not data is under way.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(PING_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(PING_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * LOST_S))


class NodeAddress(NamedTuple):
    """A host and a port; port 0 is any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_node_address(text: str) -> NodeAddress:
    """Return the address that *text* names.

    :raises InvalidArgument: *text* is not of the form HOST:PORT.
    """
    host, colon, port = text.rpartition(":")
    if colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return NodeAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise InvalidArgument(
        f"{text!r} is not an address", hint="give HOST:PORT, such as 10.0.0.2:7878"
    )


def listen_at(address: NodeAddress) -> socket.socket:
    """Return a socket that listens at *address*.

    :raises InvalidArgument: the address cannot be used.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, protocol, _, where = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as exc:
        raise InvalidArgument(
            f"cannot listen on {address}: {exc.strerror or exc}",
            hint="choose another address with --listen",
        ) from None

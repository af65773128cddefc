"""Addresses of nodes: HOST:PORT."""

from __future__ import annotations

import socket
from typing import NamedTuple

from ...backends.errors import InvalidArgument
from ...ipc.server.listener import BACKLOG


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

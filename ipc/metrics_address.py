"""The listen address of the metrics: a port, a Unix socket, or none."""

from __future__ import annotations

import ipaddress
import os
from typing import Any

import msgspec

from ..backends.texts import shorten

LOOPBACK = "127.0.0.1"
PORT_MAX = 65_535
SOCKET_PATH_BYTES_MAX = 107
"""Linux' bound on a Unix socket's path: `sun_path` without its final NUL."""
ADDRESS_FORMS = "off, a port, HOST:PORT with an IP address, or an absolute path"


class Address(msgspec.Struct, frozen=True):
    """A *host* and a *port* (0 for any free port), or the *path* of a Unix socket. Without them the
    metrics are off.
    """

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_off(self) -> bool:
        """Whether the metrics are not served."""
        return not self.host and not self.path

    @property
    def is_remote(self) -> bool:
        """Whether other machines can connect."""
        return bool(self.host) and not ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        if self.is_off or self.path:
            return self.path or "off"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(value: Any) -> Address:
    """Return the address that *value* names; a port alone means the loopback address.

    :raises ValueError: *value* is not an address.
    """
    text = str(value).strip() if isinstance(value, (int, str)) else ""
    if text.lower() == "off":
        return Address()
    path = text.removeprefix("unix:")
    if path.startswith("/") and "\0" not in path:
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ValueError(f"{path!r} is longer than {SOCKET_PATH_BYTES_MAX} bytes")
        return Address(path=path)
    host, _, port = text.rpartition(":")
    problem = ValueError(f"{shorten(value)} is not an address: {ADDRESS_FORMS}")
    if isinstance(value, bool) or not (port.isascii() and port.isdigit()):
        raise problem
    if int(port) > PORT_MAX:
        raise ValueError(f"{port} is outside 0 … {PORT_MAX}")
    host = host.removeprefix("[").removesuffix("]")
    host = LOOPBACK if host in ("", "localhost") else host
    try:
        return Address(str(ipaddress.ip_address(host)), int(port))
    except ValueError:
        raise problem from None

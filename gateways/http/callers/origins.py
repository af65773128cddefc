"""The hosts and origins of requests: protection from pages of other sites (DNS rebinding, CSRF)."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

LOCAL_NAMES = frozenset({"localhost"})


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address stands for the machine itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower().rstrip(".") in LOCAL_NAMES


def host_of(header: str) -> str:
    """Return the name in a Host header, without its port."""
    if header.startswith("["):
        return header.partition("]")[0] + "]"
    return header.partition(":")[0].lower().rstrip(".")


class Origins:
    """The hosts by which the gateway may be called, and the origins whose pages may call it.

    *any_host* is for gateways with keys, which a page of another site lacks, or on a Unix socket.
    """

    def __init__(self, hosts: Collection[str], origins: Collection[str], *, any_host: bool):
        self._hosts, self._origins = frozenset(hosts), frozenset(origins)
        self._any_host = any_host and not hosts

    def allows_host(self, header: str) -> bool:
        """Return whether a request may have this Host header."""
        host = host_of(header)
        return self._any_host or is_loopback(host) or host in self._hosts

    def is_listed(self, origin: str) -> bool:
        """Return whether pages of an origin may call the gateway and read its responses."""
        return origin in self._origins or "*" in self._origins

    def allows_origin(self, origin: str, scheme: str, host: str) -> bool:
        """Return whether a request to *host* may come from a page of *origin*."""
        return self.is_listed(origin) or origin == f"{scheme}://{host}"

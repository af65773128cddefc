"""Protection from pages of other sites (DNS rebinding, CSRF): the hosts, origins and declared types
of requests.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

from .exchange.statuses import HttpRefusal

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


_BROWSERS = frozenset(("origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode"))
"""Headers by which requests of browsers are recognized."""


def check_content(headers: Mapping[str, str]) -> None:
    """Check that a browser declares a body as JSON, which pages of other sites cannot do freely.

    For that type, the browser first asks the gateway by an OPTIONS request. Other programs may
    leave the type out, as some clients of Ollama and `curl -d` do.

    :raises HttpRefusal: a browser declares another type, or the body is compressed.
    """
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise HttpRefusal(
            415,
            f"a body with the content encoding {encoding[:100]!r} is not read",
            hint="send it without Content-Encoding",
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and _BROWSERS & headers.keys():
        raise HttpRefusal(
            415,
            f"the content type {kind[:100]!r} is not application/json",
            hint="send the header `Content-Type: application/json`",
        )

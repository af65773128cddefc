"""The rules for the head of a request: its version, its target, the headers that decide, and the
hosts, origins and declared types that protect from pages of other sites (DNS rebinding, CSRF).

Another program on the way, such as a proxy, must not read a request differently. Therefore
everything that two programs may read in two ways is refused, also where RFC 9110 and 9112 let a
server choose.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from .exchange.exchange import HttpRefusal

Header = tuple[bytes, bytes]
OWS = b" \t"
"""The characters around a header's value that do not belong to it."""
SINGLE = (
    b"authorization",
    b"content-length",
    b"content-type",
    b"host",
    b"origin",
    b"sec-fetch-mode",
    b"sec-fetch-site",
    b"x-api-key",
)
"""Headers that decide about a request and are not lists. Each may be sent once, in ASCII."""
CONTINUE = b"100-continue"
_VERSIONS = ("1.0", "1.1")
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~%-]*)(?::[0-9]*)?")
"""A Host header. RFC 3986 also allows other characters in names, which no name has."""


def check_head(version: str, target: bytes, headers: Sequence[Header]) -> HttpRefusal | None:
    """Return the refusal of a request by its head, or None. Names are in lower case."""
    if version not in _VERSIONS:
        return HttpRefusal(
            505, f"HTTP {version} is not supported", hint="send HTTP/1.1 or HTTP/1.0"
        )
    counts = Counter(name for name, _ in headers)
    for name in SINGLE:
        if counts[name] > 1:
            return _refusal(f"the request has several {_shown(name)} headers", "send one")
    for name, value in headers:
        if name in SINGLE and not value.isascii():
            message = f"the header {_shown(name)} has other characters than ASCII"
            return _refusal(message, "send only ASCII")
    return (
        _check_host(version, target, headers)
        or _check_coding(version, headers)
        or _check_expectation(version, headers)
    )


def _check_host(version: str, target: bytes, headers: Sequence[Header]) -> HttpRefusal | None:
    host = next((value for name, value in headers if name == b"host"), None)
    if host is None:
        if version == "1.0":
            return None
        return _refusal("the request has no Host header", "send one, as HTTP/1.1 requires")
    if not _HOST.fullmatch(host):
        message = f"the Host header {host[:100].decode('ascii')!r} is malformed"
        return _refusal(message, "send NAME or NAME:PORT")
    scheme, colon, rest = target.partition(b"://")
    if colon and b"/" not in scheme:
        authority = re.split(rb"[/?#]", rest, maxsplit=1)[0]
        if authority.lower() != host.lower():
            return _refusal(
                "the request's target names another host than its Host header",
                "send the path alone as the target",
            )
    return None


def _check_coding(version: str, headers: Sequence[Header]) -> HttpRefusal | None:
    """Check the transfer coding. The parser has refused a coding beside a Content-Length, and one
    in which `chunked` is not last.
    """
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return None
    if version == "1.0":
        return _refusal("HTTP/1.0 has no Transfer-Encoding", "send Content-Length, or HTTP/1.1")
    if codings != [b"chunked"]:
        return HttpRefusal(
            501,
            "another transfer coding than chunked is not supported",
            hint="send Content-Length, or `Transfer-Encoding: chunked` alone",
        )
    return None


def _check_expectation(version: str, headers: Sequence[Header]) -> HttpRefusal | None:
    if version == "1.0" or _expectations(headers) <= {CONTINUE}:
        return None
    return HttpRefusal(
        417, "another expectation than 100-continue is not supported", hint="send no Expect header"
    )


def expects_continue(version: str, headers: Sequence[Header]) -> bool:
    """Return whether the client waits for the status 100 before it sends the body."""
    return version != "1.0" and CONTINUE in _expectations(headers)


def _expectations(headers: Sequence[Header]) -> set[bytes]:
    values = [value for name, value in headers if name == b"expect"]
    return {each.strip(OWS).lower() for value in values for each in value.split(b",")} - {b""}


def _refusal(message: str, hint: str) -> HttpRefusal:
    return HttpRefusal(400, message, hint=hint)


def _shown(name: bytes) -> str:
    return "-".join(part.capitalize() for part in name.decode().split("-"))


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


def check_content(headers: Mapping[str, str], *, tensors: bool = False) -> None:
    """Check that a browser declares a body as JSON, which pages of other sites cannot do freely.

    For that type, the browser first asks the gateway by an OPTIONS request. Other programs may
    leave the type out, as some clients of Ollama and `curl -d` do. A body with *tensors* may also
    be binary, a type for which browsers ask, too, and its endpoint decompresses it.

    :raises HttpRefusal: a browser declares another type, or the body is compressed.
    """
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity" and not tensors:
        raise HttpRefusal(
            415,
            f"a body with the content encoding {encoding[:100]!r} is not read",
            hint="send it without Content-Encoding",
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    allowed = ("application/json", *(("application/octet-stream",) if tensors else ()))
    if kind not in allowed and _BROWSERS & headers.keys():
        raise HttpRefusal(
            415,
            f"the content type {kind[:100]!r} is not application/json",
            hint="send the header `Content-Type: application/json`",
        )

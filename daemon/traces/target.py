"""The target of spans: a collector, a file, or none."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ...backends.texts import shorten

TARGET_CHARACTERS_MAX = 2000
PATH = "/v1/traces"
"""The path of OTLP over HTTP, appended to an endpoint without a path."""
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
ENDPOINT_DEFAULT = "http://localhost:4318"
TARGET_FORMS = (
    "off, http://HOST:PORT of a collector, otlp (the one that OTEL_EXPORTER_OTLP_ENDPOINT names, or"
    f" {ENDPOINT_DEFAULT}), or file: and an absolute path"
)


class Target(msgspec.Struct, frozen=True):
    """The *url* of a collector or the *path* of a file; if both are empty, traces are off."""

    url: str = ""
    path: str = ""

    @property
    def is_off(self) -> bool:
        """Whether traces are off."""
        return not self.url and not self.path

    @property
    def is_remote(self) -> bool:
        """Whether spans leave this machine."""
        return bool(self.url) and not _is_loopback(urlsplit(self.url).hostname or "")

    def __str__(self) -> str:
        return self.url or (f"file:{self.path}" if self.path else "off")


def parse_target(value: Any, environ: Mapping[str, str]) -> Target:
    """Return the target that *value* names.

    :raises ValueError: *value* is not a target.
    """
    text = value.strip() if isinstance(value, str) else ""
    if len(text) > TARGET_CHARACTERS_MAX:
        raise ValueError(f"{len(text)} characters; at most {TARGET_CHARACTERS_MAX} are allowed")
    if text.lower() == "off":
        return Target()
    if text.lower() == "otlp":
        given = environ.get(TRACES_ENDPOINT)
        return _collector(given or _join(environ.get(ENDPOINT) or ENDPOINT_DEFAULT))
    path = text.removeprefix("file:")
    if path != text and path.startswith("/") and "\0" not in path:
        return Target(path=str(Path(path)))
    if "://" in text:
        return _collector(text)
    raise ValueError(f"{shorten(value)} is not a target of spans: {TARGET_FORMS}")


def _collector(text: str) -> Target:
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port or the IPv6 address is invalid
        is_address = False
    if not is_address:
        raise ValueError(f"{text!r} is not a collector's address: {TARGET_FORMS}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the address must not hold a password: use OTEL_EXPORTER_OTLP_HEADERS")
    return Target(url=text if parts.path not in ("", "/") else _join(text))


def _join(endpoint: str) -> str:
    return endpoint.rstrip("/") + PATH


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

"""The check of a body's declared type and encoding."""

from __future__ import annotations

from collections.abc import Mapping

from .statuses import HttpRefusal

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

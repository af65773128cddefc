"""The endpoints of the web page: its files, which need no key. They hold no data of users."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from ..exchange import Endpoint, Exchange
from ..exchange.exchange import HttpRefusal
from ..ollama.api import answer_running
from ..openai.forms import ERROR_SCHEMA, error_body

INDEX = "index.html"
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "json": b"application/json",
    "txt": b"text/plain; charset=utf-8",
}


class File(NamedTuple):
    """A file's content, and the headers that describe it."""

    data: bytes
    content_type: bytes
    etag: bytes


def _read_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, File]]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _read_files(path, f"{prefix}{path.name}/")
            continue
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()[:16]
        content_type = _TYPES[path.name.rpartition(".")[2]]
        yield prefix + path.name, File(data, content_type, f'"{digest}"'.encode())


FILES = dict(_read_files(files(__package__) / "files"))
"""The files by their paths, such as `libraries/katex.js`, which tools/page_libraries.py writes."""


_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]


async def answer_root(exchange: Exchange) -> None:
    """Answer browsers with the page, and programs as Ollama does, by which they recognize it."""
    if "text/html" in exchange.headers.get("accept", ""):
        await _send(exchange, FILES[INDEX], [(b"vary", b"accept")])
    else:
        await answer_running(exchange)


async def answer_file(exchange: Exchange) -> None:
    """Answer with a file of the page.

    :raises HttpRefusal: there is no such file.
    """
    file = FILES.get(exchange.params["file"])
    if file is None:
        raise HttpRefusal(404, f"there is no path {exchange.path!r}", hint="open / in a browser")
    await _send(exchange, file, [])


async def _send(exchange: Exchange, file: File, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [*_HEADERS, (b"etag", file.etag), *headers]
    if exchange.headers.get("if-none-match", "").encode() == file.etag:
        await exchange.start(304, file.content_type, headers)
        await exchange.write(b"", more=False)
    else:
        await exchange.send_whole(file.data, content_type=file.content_type, headers=headers)


class PageApi:
    """The web page as an API without requests of its own."""

    title = "page"
    prefixes = ("/page/",)
    tables = ()
    endpoints = (
        Endpoint(method="GET", path="/", answer=answer_root, public=True),
        Endpoint(method="GET", path="/page/{file:path}", answer=answer_file, public=True),
    )
    error_schema = ERROR_SCHEMA
    error_body = staticmethod(error_body)


PAGE = PageApi()

"""The files of the web page, read once."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import NamedTuple

INDEX = "index.html"
_TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}


class File(NamedTuple):
    """A file's content, and the headers that describe it."""

    data: bytes
    content_type: bytes
    etag: bytes


def _read_files() -> dict[str, File]:
    found = {}
    for path in (files(__package__) / "files").iterdir():
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()[:16]
        content_type = _TYPES[path.name.rpartition(".")[2]]
        found[path.name] = File(data, content_type, f'"{digest}"'.encode())
    return found


FILES = _read_files()
"""The files by their names."""

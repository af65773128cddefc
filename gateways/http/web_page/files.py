"""The files of the web page, read once. tools/page_libraries.py writes those of libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

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
"""The files by their paths, such as `libraries/katex.js`."""

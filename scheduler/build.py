"""The identity of the code that daemon and workers share, and thus of their messages.

Messages are arrays without field names, so only processes of one build understand each other. A
worker starts from the files on disk, which an upgrade may have replaced since the daemon started.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

EXIT_OTHER_BUILD = os.EX_PROTOCOL
"""Exit status of a worker whose files are of another build than its daemon."""
_SHARED = ("backends", "scheduler", "wire")
_PACKAGE = Path(__file__).parents[1]


def build_id(package: Path = _PACKAGE) -> str:
    """Return a digest of the shared modules' source on disk."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in _SHARED:
        # Not `Path.rglob`: it takes longer than reading the files, at each start of a process.
        for path in sorted(_sources(str(package / folder))):
            with open(path, "rb") as file:
                source = file.read()
            digest.update(f"{path.removeprefix(str(package))} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    for at, _, names in os.walk(folder):
        yield from (os.path.join(at, name) for name in names if name.endswith(".py"))

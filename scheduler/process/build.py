"""Identity of the code that daemon and workers share: what they send each other, and its meaning.

Their messages are arrays without names, so that only processes of one build understand each other.
A worker is started from the files on disk, which an upgrade may have replaced since the daemon was.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

EXIT_OTHER_BUILD = os.EX_PROTOCOL
"""Exit status of a worker whose files are of another build than the daemon that started it."""
_SHARED = ("backends", "scheduler", "wire")
_PACKAGE = Path(__file__).parents[2]


def build_id(package: Path = _PACKAGE) -> str:
    """Return a digest of the shared modules' source, as it is on disk now."""
    digest = hashlib.blake2b(digest_size=16)
    for folder in _SHARED:
        for path in sorted((package / folder).rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()

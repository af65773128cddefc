"""The files of a fleet's certificates: their names, their modes, and atomic writes."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

AUTHORITY = "authority"
"""The name of the authority's own files."""
ENTRY = "entry"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_DOMAIN = "fleet.inferd.internal"


class KeyFiles(NamedTuple):
    """The files of a certificate and of its private key."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path, name: str) -> KeyFiles:
        """Return the files of *name* in *folder*."""
        return cls(folder / f"{name}.pem", folder / f"{name}.key")


def is_node_name(text: str) -> bool:
    """Return whether *text* can be a name in a certificate."""
    return _NAME.fullmatch(text) is not None


def server_name(node: str) -> str:
    """Return the name that TLS checks in the certificate of *node*. It is not in any DNS."""
    return f"{node}.{_DOMAIN}"


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically; only its owner may read it."""
    _write_whole(path, data, 0o600)


def write_public(path: Path, data: bytes) -> None:
    """Write a file atomically; all users may read it."""
    _write_whole(path, data, 0o644)


def _write_whole(path: Path, data: bytes, mode: int) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

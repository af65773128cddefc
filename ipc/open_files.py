"""A process's limit of open files, and the part of it that descriptors of clients may use."""

from __future__ import annotations

import resource
from contextlib import suppress

_LIMIT_MAX = 1 << 20
FILES_RESERVED = 256
"""Files for workers (six each while they start), the journal, the log and the listeners."""
DESCRIPTORS_MIN = 64


def raise_open_files_limit() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, _LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def open_files_limit() -> int:
    """Return this process's limit of open files."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _LIMIT_MAX if limit == resource.RLIM_INFINITY else limit


def descriptors_max(connections_max: int) -> int:
    """Return how many descriptors of clients the daemon may hold besides *connections_max*
    connections and its own files. A connection whose client sends no more has two descriptors.
    """
    return max(DESCRIPTORS_MIN, open_files_limit() - 2 * connections_max - FILES_RESERVED)

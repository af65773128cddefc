"""Connections as other users. The daemon sees the effective user of the connecting process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from tests.daemon.other_users import as_user

VICTIM, FIRST_ATTACKER = 54320, 54321
"""Users without a name; the daemon runs as root. Further attackers have the next numbers."""
_PR_GET_SECUREBITS, _PR_SET_SECUREBITS = 27, 28
_SECBIT_NO_SETUID_FIXUP = 1 << 2


@contextmanager
def connecting_as(uid: int) -> Iterator[None]:
    """Connect as *uid* in the block. Root's right to read files, such as Python's own, stays."""
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_PR_GET_SECUREBITS, 0, 0, 0, 0)
    prctl(_PR_SET_SECUREBITS, before | _SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    try:
        with as_user(uid):
            yield
    finally:
        prctl(_PR_SET_SECUREBITS, before, 0, 0, 0)

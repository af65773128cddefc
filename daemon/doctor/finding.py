"""What a check says: how it stands, what was found, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]
_SEVERITY: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


class Finding(msgspec.Struct, frozen=True):
    """What one check says; who reads *found* and *remedy* needs nothing else."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Return that nothing is wrong."""
    return _finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Return what is worse than it could be, or could not be seen."""
    return _finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Return what keeps the daemon from its work."""
    return _finding(check, "fail", found, remedy)


def _finding(check: str, status: Status, found: str, remedy: str = "") -> Finding:
    """Return a finding that can be written: names of files may be no UTF-8."""
    shown = (text.encode(errors="backslashreplace").decode() for text in (found, remedy))
    return Finding(check, status, *shown)


def worst(findings: Iterable[Finding]) -> Status:
    """Return how it stands in all."""
    return max((f.status for f in findings), key=_SEVERITY.__getitem__, default="ok")

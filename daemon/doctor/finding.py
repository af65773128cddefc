"""Findings of checks: a status, a description and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]
_SEVERITY: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


class Finding(msgspec.Struct, frozen=True):
    """The result of one check; *found* and *remedy* are complete sentences for the reader."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Return a finding without a problem."""
    return _finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    """Return a finding of a minor problem, or of a failed probe."""
    return _finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    """Return a finding of a problem that prevents the daemon from working."""
    return _finding(check, "fail", found, remedy)


def _finding(check: str, status: Status, found: str, remedy: str = "") -> Finding:
    """Return a finding that can be encoded, even if a file name in it is not UTF-8."""
    shown = (text.encode(errors="backslashreplace").decode() for text in (found, remedy))
    return Finding(check, status, *shown)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status."""
    return max((f.status for f in findings), key=_SEVERITY.__getitem__, default="ok")

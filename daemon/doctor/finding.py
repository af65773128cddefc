"""Findings of checks: a status, a description and a remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]
_SEVERITY: dict[Status, int] = {"ok": 0, "warn": 1, "fail": 2}


class Finding(msgspec.Struct, frozen=True):
    """One result of the check named *check*; *found* and *remedy* are sentences for the reader."""

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(found: str) -> Finding:
    """Return a finding without a problem."""
    return _finding("ok", found)


def warn(found: str, remedy: str) -> Finding:
    """Return a finding of a minor problem, or of a failed probe."""
    return _finding("warn", found, remedy)


def fail(found: str, remedy: str) -> Finding:
    """Return a finding of a problem that prevents the daemon from working."""
    return _finding("fail", found, remedy)


def _finding(status: Status, *texts: str) -> Finding:
    """Return a finding that can be encoded, even if a file name in it is not UTF-8.

    The examination adds the name of the check.
    """
    shown = (text.encode(errors="backslashreplace").decode() for text in texts)
    return Finding("", status, *shown)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status."""
    return max((f.status for f in findings), key=_SEVERITY.__getitem__, default="ok")

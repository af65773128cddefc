"""Sizes of memory: the headroom left to other programs, and numbers of bytes as text."""

from __future__ import annotations

HEADROOM_BYTES_MAX = 1 << 30


def headroom_bytes(total: int) -> int:
    """Return the headroom for other programs: a twentieth of *total* bytes, at most 1 GiB."""
    return min(total // 20, HEADROOM_BYTES_MAX)


def size_text(size: float) -> str:
    """Return *size* bytes as text with three digits, or from 1 GB on with two decimals, so that the
    two numbers of a refusal differ.
    """
    value, units = max(0.0, float(size)), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    if units[0] in ("GB", "TB"):
        return f"{value:.2f}".rstrip("0").rstrip(".") + f" {units[0]}"
    return f"{value:.3g} {units[0]}"

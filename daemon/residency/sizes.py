"""Numbers of bytes as people read them: in tables, refusals and findings."""

from __future__ import annotations

__all__ = ("size_text",)


def size_text(size: float) -> str:
    """Return a number of bytes for people: three digits, from a GB on two behind the point, so that
    a refusal's two numbers differ.
    """
    value, units = max(0.0, float(size)), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    if units[0] in ("GB", "TB"):
        return f"{value:.2f}".rstrip("0").rstrip(".") + f" {units[0]}"
    return f"{value:.3g} {units[0]}"

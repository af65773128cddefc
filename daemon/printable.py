"""Text that terminals can show: without control characters, which users could choose, with colors
only where they are wanted, and with short sizes.
"""

from __future__ import annotations

import os
import re

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # bidirectional and line separators
    r"\ud800-\udfff]"  # bytes of file names that are not UTF-8; no terminal can show them
)


def are_colors_wanted() -> bool:
    """Return whether terminals are to show colors: NO_COLOR is unset or empty, as no-color.org
    defines it, and the terminal is not a dumb one, which would show the escape sequences.
    """
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def escape_controls(text: str) -> str:
    """Return *text* with its control characters as escapes, such as `\\u001b`.

    The escapes are those of JSON, so a JSON document keeps its meaning.
    """
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


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

"""Bytes that are not UTF-8 within the text of messages, which chat templates get as text.

Each such byte is written as a mark, a private character. A valid character that looks like a mark
is written as the marks of its own bytes. So `bytes_of` restores the bytes from which the text for
`mark_bytes` was decoded.
"""

from __future__ import annotations

import re

_FIRST = 0x10FE00
_ESCAPES = re.compile("[\udc80-\udcff\U0010fe80-\U0010feff]")
_MARK_BEGIN = chr(_FIRST).encode()[0]
"""The first byte of a mark in UTF-8, which only private characters of the last plane have."""
_MARKS = re.compile("[\U0010fe80-\U0010feff]+")


def is_utf8(data: bytes) -> bool:
    """Return whether *data* is UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def mark_bytes(text: str) -> tuple[str, int]:
    """Return *text*, which was decoded with `surrogateescape`, with marks, and how many characters
    were replaced by them.
    """
    return _ESCAPES.subn(_marks_of, text)


def _marks_of(found: re.Match[str]) -> str:
    return "".join(chr(_FIRST + byte) for byte in found[0].encode("utf-8", "surrogateescape"))


def bytes_of(text: str) -> bytes:
    """Return *text* in UTF-8, with the bytes of its marks."""
    data = text.encode()
    if _MARK_BEGIN not in data:  # much faster than a search by the expression
        return data
    unmarked = _MARKS.sub(lambda m: "".join(chr(ord(c) - _FIRST + 0xDC00) for c in m[0]), text)
    return unmarked.encode("utf-8", "surrogateescape")


def offset_of(text: str, byte: int) -> int:
    """Return the offset in `bytes_of(text)` of the first mark of *byte*; -1 if it has none."""
    at = text.find(chr(_FIRST + byte))
    return len(bytes_of(text[:at])) if at >= 0 else -1

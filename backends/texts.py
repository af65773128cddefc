"""Texts for people and for models: shortened values, choices, and bytes that are not UTF-8."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from typing import Any


class _Shortener(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 50

    def repr_NoneType(self, x: None, level: int) -> str:  # named by the type
        return "null"

    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_bytes(self, x: bytes, level: int) -> str:
        return f"{len(x)} bytes"

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x) if isinstance(x, float) else str(x)[: self.maxother]


shorten = _Shortener().repr


def plain_number(value: float) -> str:
    """Return a number without an exponent, if it has at most 16 digits."""
    return f"{value:.16g}"


OTHER_WORDS = {"warn": "warning", "err": "error"}
"""Words of other programs, by which a choice is meant."""


def choice_of(word: object, choices: Iterable[str]) -> str | None:
    """Return the one of *choices* that *word* spells in any case, with `-` or `_`, or by another
    program's word; None if there is none.
    """
    if not isinstance(word, str):
        return None
    known = {_plain(choice): choice for choice in choices}
    plain = _plain(word)
    return known.get(plain, known.get(OTHER_WORDS.get(plain, plain)))


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "-")


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

    Chat templates get bytes that are not UTF-8 in messages as text: each is written as a mark, a
    private character. A valid character that looks like a mark is written as the marks of its own
    bytes. So `bytes_of` restores the bytes from which *text* was decoded.
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


_SPAN_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def seconds_of_span(text: str) -> float:
    """Return the seconds of a span of time, such as `90m` or `7d`.

    :raises ValueError: it is not a number with a unit.
    """
    number, unit = text[:-1], text[-1:]
    if unit not in _SPAN_UNITS or not (number.isascii() and number.isdigit()) or len(number) > 9:
        raise ValueError(f"{shorten(text)} is not a number with a unit ({', '.join(_SPAN_UNITS)})")
    return float(int(number) * _SPAN_UNITS[unit])

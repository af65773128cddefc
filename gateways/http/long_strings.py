"""The long strings of a request's body, such as images in base64: kept out of its JSON.

A decoder of JSON copies each string while it holds the interpreter's lock, in whatever thread it
runs: 20 ms for an image of 20 MB, in which the event loop does nothing. Here the strings are found
without being copied, in short steps, and only what is between them is decoded.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

STRING_BYTES_MIN = 64 << 10
"""The length from which a string without quotes and escapes is kept out."""
STEP_BYTES = 1 << 20
"""Bytes that are searched before other threads get the interpreter's lock."""


class LongBody:
    """A request's body, in which long strings are found. Made in a thread; then its owner's."""

    def __init__(self, body: bytearray):
        self.body = body
        """The whole body."""
        self.text: bytes | bytearray = body
        """The body with marks in place of the long strings."""
        self._strings: dict[str, memoryview] = {}
        """The long strings by their marks, which nobody can guess."""
        self._cut()

    def _cut(self) -> None:
        view, nonce, begin = memoryview(self.body), secrets.token_hex(16), 0
        kept: list[bytes | memoryview] = []
        for start, end in _without_quotes(self.body):
            mark = f"{nonce}{len(self._strings)}"
            self._strings[mark] = view[start:end]
            kept += (view[begin:start], mark.encode())
            begin = end
        if kept:
            self.text = b"".join((*kept, view[begin:]))

    def put_strings(self, fields: dict[str, Any], places: Sequence[str]) -> bool:
        """Put the long strings into *fields*, which were decoded from `text`, as views of their
        bytes, where these are at *places* such as ``messages.*.content.*.url``. Return whether
        there are no others.
        """
        left = dict(self._strings)
        for place in places:
            _put(fields, place.split("."), left)
        return not left


def _without_quotes(body: bytearray) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of the long parts between two quotes that have no backslash. In
    JSON, such a part is a string, or the end of one, or it is outside of strings.
    """
    begin, next_pause = 0, STEP_BYTES
    while begin + STRING_BYTES_MIN <= len(body):
        quote = body.rfind(b'"', begin, begin + STRING_BYTES_MIN)
        if quote >= 0:
            begin = quote + 1
        else:
            end, escapes = _end_of(body, begin)
            if end < len(body) and not escapes:
                yield begin, end
            begin = end + 1
        if begin > next_pause:
            next_pause = begin + STEP_BYTES
            time.sleep(0)


def _end_of(body: bytearray, begin: int) -> tuple[int, bool]:
    """Return the place of the next quote, or the end, and whether a backslash is before it."""
    escapes = False
    for step in range(begin, len(body), STEP_BYTES):
        quote = body.find(b'"', step, step + STEP_BYTES)
        end = quote if quote >= 0 else min(step + STEP_BYTES, len(body))
        escapes = escapes or body.find(b"\\", step, end) >= 0
        if quote >= 0:
            return quote, escapes
        time.sleep(0)
    return len(body), escapes


def _put(value: Any, place: Sequence[str], strings: dict[str, memoryview]) -> None:
    """Put strings at a place in *value*, and remove them from *strings*."""
    step, rest = place[0], place[1:]
    keys: Sequence[Any] = ()
    if step == "*" and isinstance(value, list):
        keys = range(len(value))
    elif isinstance(value, dict) and step in value:
        keys = (step,)
    for key in keys:
        item = value[key]
        if rest:
            _put(item, rest, strings)
        elif isinstance(item, str) and item in strings:
            value[key] = strings.pop(item)

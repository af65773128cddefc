"""Short forms of users' values for messages, in JSON's words: null, true and false."""

from __future__ import annotations

import reprlib
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

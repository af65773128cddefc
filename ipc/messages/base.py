"""Base types of the messages of all calls."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ("TRACEPARENT_CHARACTERS_MAX", "Empty", "Map", "Traceparent")

TRACEPARENT_CHARACTERS_MAX = 128
_SPAN = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
Traceparent = Annotated[
    str,
    msgspec.Meta(
        max_length=TRACEPARENT_CHARACTERS_MAX,
        pattern=rf"^(00-{_SPAN}|(?!00|ff)[0-9a-f]{{2}}-{_SPAN}(-[!-~]*)?)?\Z",
    ),
]
"""The span that a call is made in, as W3C's Trace Context writes it; empty: none."""


class Map(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Travels as a map, in which a field may be left out that has its default."""


class Empty(Map):
    """No fields."""

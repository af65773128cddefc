"""What all messages of a worker's line have in common."""

from __future__ import annotations

import msgspec

__all__ = ("Message",)


class Message(msgspec.Struct, array_like=True, tag=True):
    """A struct that the line carries as an array without names, tagged with its own."""

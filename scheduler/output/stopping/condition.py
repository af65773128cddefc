"""The interface of conditions on a turn's text."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .ending import StopReason

WITHHELD_BYTES_MAX = 4096
"""Text that a pattern may still match is withheld up to so much of it."""


class Stop(NamedTuple):
    """A condition that is met: at the byte *met* of the answer, whose text ends at the byte *end*.

    In this order the one counts that was met first, and of those the one that leaves least.
    """

    met: int
    end: int
    reason: StopReason
    detail: str


class TextCondition(Protocol):
    """A condition on an answer's text, however that is split into pieces."""

    reason: StopReason

    @property
    def undecided(self) -> int | None:
        """The byte from which text might be cut off later; None: nothing will."""

    def feed(self, text: str, at: int) -> Stop | None:
        """Take the next *text*, whole characters that stand at the byte *at*."""

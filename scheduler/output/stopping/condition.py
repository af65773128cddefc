"""The interface of conditions on a turn's text."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from .ending import StopReason

WITHHELD_BYTES_MAX = 4096
"""At most this much text is withheld because a pattern may still match it."""


class Stop(NamedTuple):
    """A condition that is met at the byte *met* of the answer, whose text then ends at byte *end*.

    Stops sort by these: the first met counts, and among those the one that leaves least text.
    """

    met: int
    end: int
    reason: StopReason
    detail: str


class TextCondition(Protocol):
    """A condition on an answer's text, independent of its split into pieces."""

    reason: StopReason

    @property
    def undecided(self) -> int | None:
        """The byte from which text may be cut off later; None: no text will be."""

    def check_text(self, text: str, at: int) -> Stop | None:
        """Check the next *text*, whole characters that start at the byte *at*."""

"""The endings of turns and the stop reasons, each declared once, beside its condition.

Histories store reasons by name. `cuts_text` looks a reason up, so a new condition that cuts text is
known to all readers of a history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True, order=True)
class StopReason:
    """A reason by the *name* that clients and histories use. Creating one declares it."""

    name: str
    cuts_text: bool = False
    """Whether text is cut off. Its tokens stay in the history."""

    def __post_init__(self) -> None:
        assert self.name not in REASONS, f"the stop reason {self.name} is declared twice"
        REASONS[self.name] = self


REASONS: dict[str, StopReason] = {}
"""All declared reasons, by name."""

# Reasons without a condition class in this package. Importing the package declares all reasons.
STOP_TEXT = StopReason("stop", cuts_text=True)
END_MARK = StopReason("eos")
TOKEN = StopReason("token")
GRAMMAR = StopReason("grammar")
TIME = StopReason("time")
LENGTH = StopReason("length")
CONTEXT_FULL = StopReason("context_full")
EMBEDDED = StopReason("embedded")


class Ending(NamedTuple):
    """The ending of a turn; *piece* is the text of the end mark."""

    reason: StopReason
    detail: str
    piece: bytes = b""


class Stop(NamedTuple):
    """A condition that is met at the byte *met* of the answer, whose text then ends at byte *end*.

    Stops sort by these fields. The first met counts, and among those the one that leaves least
    text.
    """

    met: int
    end: int
    reason: StopReason
    detail: str


class TextCondition(Protocol):
    """A condition on an answer's text, independent of its split into pieces."""

    @property
    def undecided(self) -> int | None:
        """The byte from which text may be cut off later, or None if no text will be."""

    def check_text(self, text: str, at: int) -> Stop | None:
        """Check the next *text*, whole characters that start at the byte *at*."""


def cuts_text(reason: str | None) -> bool:
    """Return whether a turn that ended by *reason* has tokens whose text was cut off."""
    return reason in REASONS and REASONS[reason].cuts_text

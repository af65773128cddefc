"""The ends of turns, and the reasons for them, each declared once: beside its condition.

Histories keep reasons by name. `cuts_text` is asked about those, so a condition that cuts text is
known to all readers of a history as soon as it exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, order=True)
class StopReason:
    """Why a turn ends, by the *name* that clients and histories have. To create one declares it."""

    name: str
    cuts_text: bool = False
    """Text is cut off whose tokens stay: the tokens of the history say more than its text."""

    def __post_init__(self) -> None:
        assert self.name not in REASONS, f"the stop reason {self.name} is declared twice"
        REASONS[self.name] = self


REASONS: dict[str, StopReason] = {}
"""All declared reasons, by name."""

# These have no class of conditions in this package, which is loaded as a whole.
STOP_TEXT = StopReason("stop", cuts_text=True)
END_MARK = StopReason("eos")
TOKEN = StopReason("token")
GRAMMAR = StopReason("grammar")
TIME = StopReason("time")
LENGTH = StopReason("length")
CONTEXT_FULL = StopReason("context_full")
EMBEDDED = StopReason("embedded")


class Ending(NamedTuple):
    """Why a turn ends; *piece* is the text of the end mark."""

    reason: StopReason
    detail: str
    piece: bytes = b""


def cuts_text(reason: str | None) -> bool:
    """Return whether a turn that ended by *reason* has tokens whose text was cut off."""
    return reason in REASONS and REASONS[reason].cuts_text

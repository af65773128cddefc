"""The decision how a turn goes on after its connection was lost: pure functions."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class SessionProgress(NamedTuple):
    """A session's progress: turns begun, and tokens of its history."""

    turns: int
    tokens: int


class RecoveryStep(Enum):
    """How a turn goes on over another connection."""

    REPEAT = auto()
    """Nothing of the turn had arrived: it is requested again."""
    ANSWER = auto()
    """Its input had arrived, and no turn began: that input is answered."""
    RESUME = auto()
    """The turn had begun and has no end: the rest is streamed."""
    FAIL = auto()
    """The turn ended without a reader, or the daemon does not know it any more."""


def recovery_step(
    before: SessionProgress | None,
    after: SessionProgress,
    *,
    detached: bool,
    tokens_read: int,
    refused: bool,
) -> RecoveryStep:
    """Decide how a turn goes on after *tokens_read* tokens of it were read.

    *before* is the session's progress when the turn was requested (None: that was not reached),
    *after* the present one. *detached*: its last turn has no end. *refused*: the daemon has said
    that the turn had not begun.
    """
    if before is None or (after == before and not tokens_read):
        return RecoveryStep.REPEAT
    if detached and after.turns > before.turns:
        return RecoveryStep.RESUME
    if not tokens_read and (refused or after.turns == before.turns):
        return RecoveryStep.ANSWER
    return RecoveryStep.FAIL

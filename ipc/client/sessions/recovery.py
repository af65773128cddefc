"""The decision how a turn continues after its connection was lost: pure functions."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class SessionProgress(NamedTuple):
    """A session's progress: the number of turns begun, and of tokens in its history."""

    turns: int
    tokens: int


class RecoveryStep(Enum):
    """How a turn continues over another connection."""

    REPEAT = auto()
    """The daemon received nothing of the turn: request it again."""
    ANSWER = auto()
    """The daemon received its input, but no turn began: request an answer to that input."""
    RESUME = auto()
    """The turn began and was interrupted: stream the rest."""
    FAIL = auto()
    """The turn ended without a reader, or the daemon no longer knows it."""


def recovery_step(
    before: SessionProgress | None,
    after: SessionProgress,
    *,
    detached: bool,
    tokens_read: int,
    refused: bool,
) -> RecoveryStep:
    """Return how a turn continues of which *tokens_read* tokens were read.

    *before* is the session's progress when the turn was requested (None if it was not), *after* the
    present progress. *detached*: the session's last turn was interrupted. *refused*: the daemon
    answered that the turn had not begun.
    """
    if before is None or (after == before and not tokens_read):
        return RecoveryStep.REPEAT
    if detached and after.turns > before.turns:
        return RecoveryStep.RESUME
    if not tokens_read and (refused or after.turns == before.turns):
        return RecoveryStep.ANSWER
    return RecoveryStep.FAIL

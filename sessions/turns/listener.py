"""Reports of turns that begin and end, to other parts of the daemon."""

from __future__ import annotations

from typing import Protocol

from ..turn import Turn
from ..worker_client import ModelSource


class TurnListener(Protocol):
    """A listener of the turns of all sessions, called on the daemon's event loop."""

    def turn_began(self, model: ModelSource, turn: Turn, *, chat: bool) -> None:
        """Note a turn that begins, in the task of its call; *chat*: its history is a chat."""

    def turn_ended(self, model: ModelSource, turn: Turn) -> None:
        """Note a turn that has ended."""

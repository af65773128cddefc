"""Conditions that end a turn beside the end mark, the stop texts and the bounds (docs/stopping.md).

They depend only on the turn's tokens: a turn that continues in another worker replays its tokens.
Time limits are in `scheduler.engine.deadlines`.
"""

from .ending import Ending, Stop, StopReason, cuts_text
from .turn_conditions import TextConditions, TurnConditions

__all__ = (
    "Ending",
    "Stop",
    "StopReason",
    "TextConditions",
    "TurnConditions",
    "cuts_text",
)

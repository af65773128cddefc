"""What ends a turn beside the end mark, the stop texts and the bounds; see docs/stopping.md.

All of it is a function of the turn's tokens, so that a turn goes on in another worker as it would
have: there they are fed again. Time limits, which are not, are in `scheduler.deadlines`.
"""

from .condition import Stop, TextCondition
from .ending import Ending, StopReason, cuts_text
from .watch import TextConditions, TurnConditions

__all__ = (
    "Ending",
    "Stop",
    "StopReason",
    "TextCondition",
    "TextConditions",
    "TurnConditions",
    "cuts_text",
)

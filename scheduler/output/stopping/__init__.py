"""Conditions that end a turn, other than end mark, stop texts and bounds (docs/stopping.md).

They depend on the turn's tokens alone, except for `t-max-predict-ms`, whose time
`TurnConditions.line_ms` holds and `output.sampling` checks. A turn that continues in another worker
replays its tokens.
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

"""Turns of the daemon's models, for any API: connections, sessions, answers and their ends."""

from __future__ import annotations

from .answer_schemas import schema_options
from .answers import Answer, FinishReason, TurnProgress, TurnReader
from .pool import ConnectionPool
from .request import TurnRequest
from .runner import Embedded, TurnRunner, no_previous
from .whole_calls import WholeCalls

__all__ = (
    "Answer",
    "ConnectionPool",
    "Embedded",
    "FinishReason",
    "TurnProgress",
    "TurnReader",
    "TurnRequest",
    "TurnRunner",
    "WholeCalls",
    "no_previous",
    "schema_options",
)

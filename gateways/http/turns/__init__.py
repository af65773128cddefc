"""Turns of the daemon's models, for any API: connections, sessions, answers and their ends."""

from __future__ import annotations

from .answer_schemas import schema_options
from .answers import Answer, FinishReason, TurnProgress, TurnReader, finish_reason_of
from .event_ids import EventId
from .live import LiveTurn, Rest
from .pool import ConnectionPool
from .request import TurnRequest
from .reservations import Reservation, turn_cancelled
from .runner import Embedded, TurnRunner, no_previous
from .whole_calls import WholeCalls

__all__ = (
    "Answer",
    "ConnectionPool",
    "Embedded",
    "EventId",
    "FinishReason",
    "LiveTurn",
    "Reservation",
    "Rest",
    "TurnProgress",
    "TurnReader",
    "TurnRequest",
    "TurnRunner",
    "WholeCalls",
    "finish_reason_of",
    "no_previous",
    "schema_options",
    "turn_cancelled",
)

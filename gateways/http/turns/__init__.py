"""Turns of the daemon's models, for any API: connections, sessions, answers and their ends."""

from __future__ import annotations

from .answers import (
    Answer,
    FinishReason,
    TurnProgress,
    TurnReader,
    TurnRequest,
    WholeCalls,
    finish_reason_of,
    schema_options,
)
from .live import EventId, LiveTurn, Reservation, Rest, turn_cancelled
from .pool import ConnectionPool, new_client
from .runner import Embedded, TurnRunner, no_previous

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
    "new_client",
    "no_previous",
    "schema_options",
    "turn_cancelled",
)

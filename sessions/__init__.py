"""Conversations: who owns them, what they know, what they may do next, when they end.

Knows nothing of llama.cpp and of sockets. `table.py` says what is allowed when; `session.py` is
one conversation, `turn.py` one turn of it; `manager.py` holds them all; `port.py` is what they
need of the machine below.
"""

from .ledger import Ledger
from .manager import SessionManager
from .port import ModelSource, Port
from .session import Session, TurnOptions
from .turn import Turn

__all__ = (
    "Ledger",
    "ModelSource",
    "Port",
    "Session",
    "SessionManager",
    "Turn",
    "TurnOptions",
)

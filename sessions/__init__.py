"""Conversations: who owns them, what they know, what they may do next, when they end.

Knows nothing of llama.cpp and of sockets. `table.py` says what is allowed when; `session.py` is
one conversation, `turn.py` one turn of it; `manager.py` holds them all, `journal.py` writes those
with an id down; `port.py` is what they need of the machine below.
"""

from .entries import Stored
from .journal import Journal
from .ledger import Ledger
from .manager import DAY_S, SessionManager
from .parameters import TurnOptions
from .port import ModelSource, Port, TaskReader
from .quotas import Quota, check_priority
from .session import Session
from .turn import Turn

__all__ = (
    "DAY_S",
    "Journal",
    "Ledger",
    "ModelSource",
    "Port",
    "Quota",
    "Session",
    "SessionManager",
    "Stored",
    "TaskReader",
    "Turn",
    "TurnOptions",
    "check_priority",
)

"""Conversations: who owns them, what they know, what they may do next, when they end.

Knows nothing of llama.cpp and of sockets. `table.py` says what is allowed when; `session.py` is
one conversation, `turn.py` one turn of it; `manager.py` holds them all, `journal.py` writes those
with an id down; `worker_client.py` is what they need of the worker below.
"""

from .admission.bounds import AdmissionBounds
from .admission.ledger import Ledger
from .admission.quotas import Quota, check_priority
from .journal.entries import StoredSession
from .journal.journal import Journal
from .session.core import SessionSettings
from .session.dormant import DAY_S, DormantLimits
from .session.manager import SessionManager
from .session.session import Session
from .turn import Turn
from .turns.turn_options import Parameters, TurnOptions
from .worker_client import ModelSource, TaskReader, WorkerClient

__all__ = (
    "DAY_S",
    "DormantLimits",
    "AdmissionBounds",
    "Journal",
    "Ledger",
    "ModelSource",
    "WorkerClient",
    "Parameters",
    "Quota",
    "Session",
    "SessionManager",
    "SessionSettings",
    "StoredSession",
    "TaskReader",
    "Turn",
    "TurnOptions",
    "check_priority",
)

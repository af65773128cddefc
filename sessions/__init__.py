"""Conversations: their owners, histories, states and ends. Independent of llama.cpp and sockets.

Imports go downwards: `manager.py` (all sessions) uses `named_states.py` and `elsewhere/` (sessions
of other daemons), then `lifetimes/`, `conversation/`, `journal/`, `admission/`, `turn/`,
`history/`, `worker_client.py` (the interface of the worker below), `entries.py` (stored values)
and `answers/`.
`table.py` has the states.
"""

from .admission.bounds import AdmissionBounds, Quota, check_connections, check_priority
from .admission.ledger import Ledger
from .conversation.session import Session
from .conversation.state import SessionSettings
from .elsewhere.copies import CopiedSession
from .elsewhere.documents import ExportedSession, Upload, Uploads, decode_change, encode_change
from .elsewhere.moving import DepartedSession, Hold
from .entries import CopyChange, Dates, StoredSession, Transfer
from .identity import check_id, check_search, checked_title, matches, name_of_id
from .journal.journal import ChangeSender, Journal, Recording
from .lifetimes.places import PlaceBounds, PlaceWait
from .lifetimes.sessions_in_memory import DAY_S, DormantLimits
from .manager import Opening, SessionManager
from .named_states import NamedState, NamedStates, StateFacts, StateLimits
from .table import SessionState
from .turn.options import Parameters, TurnNotes, TurnOptions
from .turn.turn import Turn
from .usage.limits import UsageLimits
from .usage.rows import Group, Sum, UsageQuery
from .usage.usage import Usage
from .worker_client import ModelSource, TaskReader, WorkerClient

__all__ = (
    "DAY_S",
    "Dates",
    "DepartedSession",
    "DormantLimits",
    "ExportedSession",
    "AdmissionBounds",
    "CopiedSession",
    "CopyChange",
    "Group",
    "Hold",
    "Journal",
    "Ledger",
    "ModelSource",
    "NamedState",
    "NamedStates",
    "Opening",
    "StateFacts",
    "StateLimits",
    "WorkerClient",
    "Parameters",
    "PlaceBounds",
    "PlaceWait",
    "Quota",
    "Recording",
    "Session",
    "ChangeSender",
    "SessionManager",
    "Sum",
    "SessionSettings",
    "SessionState",
    "StoredSession",
    "TaskReader",
    "Transfer",
    "Turn",
    "TurnNotes",
    "TurnOptions",
    "Upload",
    "Uploads",
    "Usage",
    "UsageLimits",
    "UsageQuery",
    "check_connections",
    "check_id",
    "check_priority",
    "check_search",
    "checked_title",
    "decode_change",
    "encode_change",
    "matches",
    "name_of_id",
)

"""Conversations: their owners, histories, states and ends. Independent of llama.cpp and sockets.

`table.py` has the states; `session/` one conversation and the manager of all; `turn.py` one turn;
`history/` token ids and messages; `journal/` sessions on disk; `states/` named states, from which
sessions begin; `admission/` bounds and quotas; `turns/` a turn's options and start;
`worker_client.py` the interface of the worker below.
"""

from .admission.bounds import AdmissionBounds
from .admission.ledger import Ledger
from .admission.quotas import Quota, check_connections, check_priority
from .copies.document import decode_change, encode_change
from .copies.stored_copies import CopiedSession
from .journal.entries import CopyChange, Dates, StoredSession, Transfer
from .journal.journal import Journal
from .journal.recording import ChangeSender, Recording
from .moving.exported import ExportedSession
from .moving.moving_sessions import DepartedSession, Hold
from .moving.uploads import Upload, Uploads
from .session.core import SessionSettings, name_of_id
from .session.dormant import DAY_S, DormantLimits
from .session.manager import SessionManager, check_id
from .session.places import PlaceBounds, PlaceWait
from .session.session import Session
from .session.titles import check_search, checked_title, matches
from .states.named_state import NamedState, StateFacts
from .states.named_states import NamedStates, StateLimits
from .table import SessionState
from .turn import Turn
from .turns.turn_options import Parameters, TurnNotes, TurnOptions
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
    "Hold",
    "Journal",
    "Ledger",
    "ModelSource",
    "NamedState",
    "NamedStates",
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

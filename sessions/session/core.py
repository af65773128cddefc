"""A session's identity, settings and conversation, which its input, turns and output share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ...scheduler.priority import Priority
from ..admission.forecast import Ticket
from ..admission.ledger import Ledger
from ..history.history import History
from ..journal.recording import NoRecording
from ..table import ACTIVE, SessionCall, SessionState, step
from ..turn import Turn
from ..turns.turn_options import Parameters
from ..worker_client import ModelSource
from .conversation import Conversation, LastTurn


@dataclass
class SessionSettings:
    """Settings that hold until a client changes them; a branch has a copy of all.

    *persist*: a session with an id may be written to disk, its history by `recording`, its KV state
    by the worker.
    """

    parameters: Parameters
    priority: Priority = Priority.NORMAL
    persist: bool = True
    adapters: tuple[str, ...] = ()
    """The keys of the last turn's: its KV state is found by them."""
    lora: dict[str, float] = field(default_factory=dict)
    """The same for users: scales by names."""

    def copy(self) -> SessionSettings:
        """Return the same settings, for another session."""
        return replace(self, parameters=self.parameters.copy(), lora=dict(self.lora))


class SessionCore:
    """Owned by the daemon's event loop."""

    def __init__(
        self,
        handle: int,
        owner: int,
        model: ModelSource,
        ledger: Ledger,
        settings: SessionSettings,
        session_id: str | None = None,
    ):
        self.handle = handle
        self.owner = owner
        self.model = model
        self.ledger = ledger
        self.settings = settings
        self.session_id = session_id
        self.conversation = Conversation()
        self.recording = NoRecording()
        self.ticket: Ticket | None = None
        """The place in the ledger of the turn that is under way."""
        self.used_at = 0.0
        self.rested_at: float | None = None
        """When its last turn ended, if this daemon knows."""
        self.turn_at = 0.0
        self.turns_begun = 0

    @property
    def name(self) -> str:
        """The engine's name for it: unique among its owner's sessions, and never given again."""
        return f"#{self.handle}" if self.session_id is None else f"id:{self.session_id}"

    @property
    def state(self) -> SessionState:
        """The state of the session's table."""
        return self.conversation.state

    @property
    def active(self) -> bool:
        """Whether a turn is under way."""
        return self.state in ACTIVE

    @property
    def turn(self) -> Turn | None:
        """The last turn on the present history."""
        return self.conversation.last.turn

    def move_state(self, call: SessionCall) -> None:
        """Do one step of the state table, or raise the error that refuses it."""
        self.conversation.state = step(self.state, call)
        if self.ticket is not None:
            self.ledger.move_ticket(self.ticket, self.state)
            self.ticket = self.ticket if self.active else None

    def accept_history(self, call: SessionCall, history: History) -> None:
        """Do a step of the state table that puts another history in place, without a turn."""
        self.move_state(call)
        self.conversation.history_state.replace_history(history)
        self.conversation.last = LastTurn()
        self.recording.history_changed()

    async def wait_recorded(self) -> None:
        """Wait until everything answered is in the journal, or cannot be: see the metadata."""
        await self.recording.wait_written()

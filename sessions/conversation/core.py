"""A session's identity, settings and conversation, which its input, turns and output share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ...backends.errors import ErrorFields, PromptTooLong, QuotaExceeded
from ...scheduler.messages import SharedKv
from ...scheduler.owner import Owner
from ...scheduler.priority import Priority, Requester
from ..admission.bounds import Ticket
from ..admission.ledger import Ledger
from ..entries import Transfer, TurnBegin, TurnEnd
from ..history.history import History
from ..history.state import HistoryState, HistoryVocabulary
from ..identity import name_of_id
from ..journal.journal import Recording, Shift
from ..memory import SESSION_BYTES, memory_bytes
from ..table import ACTIVE, SessionCall, SessionState, step
from ..turn.options import Parameters, TurnParameters
from ..turn.turn import Turn
from ..worker_client import ModelSource

TITLE_BYTES = 4
"""The most memory of a character."""
TURN_SPARE_BYTES = 16 << 10
"""Memory left for a turn's options and answer, where dropped messages would take it."""


@dataclass
class SessionSettings:
    """Settings that hold until a client changes them; a branch gets a copy.

    With *persist*, the history of a session with an id may be written to disk by `recording`, and
    its KV state by the worker.
    """

    parameters: Parameters
    priority: Priority = Priority.NORMAL
    persist: bool = True
    adapters: tuple[str, ...] = ()
    """The keys of the last turn's adapters, by which its KV state is found."""
    shared_kv: SharedKv | None = None
    """The KV state of another user's named state, if the session began with that."""
    lora: dict[str, float] = field(default_factory=dict)
    """The scales of the last turn's adapters by their names, as users see them."""
    on_behalf_of: str = ""
    """The owner's name, if a gateway opened the session."""
    note: bytes = b""
    """Bytes that a client has stored with the session, and reads itself."""
    title: str = ""
    """The title that a client has set; empty: the beginning of the first message."""
    opening: str = ""
    """The beginning of the first message of a dormant session, whose history is packed."""
    kept: bool = False
    """Whether it is not deleted while it is dormant."""
    undo_s: float = 0.0
    """The time for which it can be restored after its deletion; 0: it is not deleted."""

    def copy(self) -> SessionSettings:
        """Return the same settings, for another session, without those of this one alone."""
        return replace(
            self,
            parameters=self.parameters.copy(),
            lora=dict(self.lora),
            note=b"",
            title="",
            opening="",
            kept=False,
        )


class Overlong(NamedTuple):
    """A prompt with more bytes than any context of the model holds. It was not tokenized, and has
    at least this number of *tokens*.
    """

    size: int
    tokens: int
    ctx_size: int
    """The tokens of the model's contexts."""

    def error(self, history_tokens: int, requested_ctx_size: int = 0) -> PromptTooLong:
        """Return the error of a turn on a history with this prompt."""
        tokens = history_tokens + self.tokens
        ctx_size = min(self.ctx_size, requested_ctx_size or self.ctx_size)
        return PromptTooLong(
            f"the prompt has {self.size} bytes, and with its history at least {tokens} tokens; the"
            f" context holds {ctx_size - 1} and one for the answer",
            data={"prompt_tokens": tokens, "ctx_size": ctx_size, "prompt_bytes": self.size},
        )


@dataclass
class LastTurn:
    """The last turn on a history; new input replaces this object."""

    turn: Turn | None = None
    begin: TurnBegin = field(default_factory=TurnBegin)
    piece: bytes = b""
    """The text of the token that `compute_single` returned last."""
    end: TurnEnd | None = None
    """The turn's end, kept if the session has an id. It is None before the end, and for an
    interrupted turn.
    """
    reader_left: bool = False
    """The turn was cancelled because its reader has disconnected."""
    output_cleared: bool = False
    """`fini_single` was called: the output was deleted, the history is unchanged."""
    ending_read: bool = False
    before: BeforeInput | None = None
    """The session before the turn's input, which is restored if the turn is refused."""
    overlong: Overlong | None = None
    """Input that is not in the history, because no context of the model holds it."""
    failure: ErrorFields | None = None
    """The error of the last call of wasi-nn for a turn, in the form of the protocol; empty if there
    is none. It may have refused the turn.
    """

    @cached_property
    def options_bytes(self) -> int:
        """The memory of the turn's options."""
        return memory_bytes(self.begin.options)


@dataclass
class Conversation:
    """The state, history and last turn of a session. `copy` copies each part, whose own parts are
    values or are replaced, never changed.
    """

    state: SessionState = SessionState.EMPTY
    history_state: HistoryState = field(default_factory=HistoryState)
    vocabulary: HistoryVocabulary = field(default_factory=HistoryVocabulary)
    last: LastTurn = field(default_factory=LastTurn)

    def copy(self) -> Conversation:
        """Return a copy that later changes do not affect."""
        return Conversation(**{name: copy(value) for name, value in vars(self).items()})

    @property
    def prompt(self) -> list[int]:
        """The history up to the turn, in token ids."""
        return self.history_state.now.prompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat up to the turn; empty for raw text."""
        return self.history_state.now.messages

    @property
    def turns_back(self) -> int:
        """The number of turns that can be rewound."""
        return len(self.history_state.now.marks)

    @property
    def size(self) -> int:
        """The length of the history in tokens, also of a dormant session."""
        dormant_tokens = self.history_state.dormant_tokens
        if dormant_tokens is not None:
            return dormant_tokens
        return len(self.prompt) if self.last.turn is None else self.last.turn.history_size

    @property
    def shifted(self) -> bool:
        """Whether a context shift has dropped tokens of the history."""
        turn = self.last.turn
        return self.history_state.now.shifted or (turn is not None and bool(turn.shifts))

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes."""
        last = self.last
        total = self.history_state.kept_bytes + self.vocabulary.kept_bytes + len(last.piece)
        total += last.options_bytes + (0 if last.end is None else len(last.end.metadata))
        total += 0 if last.before is None else last.before.kept_bytes
        total += memory_bytes(last.failure)
        return total if last.turn is None else total + last.turn.kept_bytes

    def tokens(self) -> list[int]:
        """Return the prompt and the output tokens that were sent to the reader."""
        return self.prompt if self.last.turn is None else self.last.turn.history()

    def current_history(self) -> History:
        """Return a new history with the output of the last turn."""
        return self.history_state.now.after(self.last.turn)


class BeforeInput(NamedTuple):
    """The part of a session that the input and the start of a turn change."""

    conversation: Conversation
    shifts: tuple[Shift, ...]
    turn_parameters: TurnParameters
    adapters: tuple[str, ...]
    lora: dict[str, float]
    unused: Mapping[str, str]
    rested_at: float | None
    turns_begun: int

    @property
    def kept_bytes(self) -> int:
        """The memory that it takes beside the present conversation, which has the messages too."""
        return self.conversation.kept_bytes - self.conversation.history_state.now.messages_bytes


@dataclass(eq=False, repr=False)
class SessionCore:
    """A session without its methods for calls. Owned by the daemon's event loop."""

    handle: int
    owner: Owner
    model: ModelSource
    ledger: Ledger
    settings: SessionSettings
    session_id: str | None = None
    conversation: Conversation = field(init=False, default_factory=Conversation)
    recording: Recording = field(init=False, default_factory=Recording)
    transfer: Transfer | None = field(init=False, default=None)
    """The move with which it arrives from another daemon."""
    ticket: Ticket | None = field(init=False, default=None)
    """The ledger's ticket of the turn that is under way."""
    used_at: float = field(init=False, default=0.0)
    place_since: float = field(init=False, default=0.0)
    """The time at which it got its place among the open sessions."""
    request_place: Callable[[], None] | None = field(init=False, default=None)
    """Requests a place for its turn; None while it has one."""
    calls_under_way: int = field(init=False, default=0)
    """The number of calls that use it now; meanwhile it is not idle."""
    rested_at: float | None = field(init=False, default=None)
    """The time at which its last turn ended; None if none has ended in this daemon."""
    turn_at: float = field(init=False, default=0.0)
    turns_begun: int = field(init=False, default=0)

    @property
    def name(self) -> str:
        """The engine's name for it: unique among its user's sessions, and never reused."""
        if self.session_id is None:
            return f"#{self.handle}"
        return name_of_id(self.owner.label, self.session_id)

    @property
    def requester(self) -> Requester:
        """Its owner and class, which decide when its texts are tokenized."""
        return self.ledger.requester(self.owner, self.settings.priority)

    @property
    def state(self) -> SessionState:
        """The state in the session's table."""
        return self.conversation.state

    @property
    def active(self) -> bool:
        """Whether a turn is under way."""
        return self.state in ACTIVE

    @property
    def in_use(self) -> bool:
        """Whether a turn or a call is under way, so that it is not idle."""
        return self.active or self.calls_under_way > 0

    @property
    def turn(self) -> Turn | None:
        """The last turn on the present history."""
        return self.conversation.last.turn

    @property
    def kept_bytes(self) -> int:
        """The memory that the session takes in the daemon."""
        settings = self.settings
        options = settings.parameters.kept_bytes + memory_bytes(settings.adapters, settings.lora)
        texts = len(settings.note) + TITLE_BYTES * len(settings.title + settings.opening)
        return SESSION_BYTES + options + texts + self.conversation.kept_bytes

    @property
    def branch_bytes(self) -> int:
        """The memory that a branch would take. It lacks the note, and the state before the last
        input, which only the session itself can restore.
        """
        before = self.conversation.last.before
        own = len(self.settings.note) + (0 if before is None else before.kept_bytes)
        return self.kept_bytes - own

    def check_growth(self, more: int) -> None:
        """Check that the session may keep *more* bytes.

        :raises QuotaExceeded: its owner's bound would be exceeded.
        """
        self.ledger.kept_bytes.check_growth(self.owner, more)

    def count_kept_bytes(self) -> None:
        """Count the session's present size to its owner."""
        self.ledger.kept_bytes.set_bytes(self, self.kept_bytes)

    def accept_input(
        self, history: History, unused: Mapping[str, str], spare_bytes: int = 0
    ) -> None:
        """Accept a history with new input; the parameters *unused* have no effect on its turn.
        Messages that the model no longer reads are deleted, if the user's memory does not suffice
        for them and for *spare_bytes* more.

        :raises QuotaExceeded: its owner's sessions would become too large.
        """
        kept_bytes = self.conversation.history_state.kept_bytes
        if history.dropped_bytes:
            try:
                self.check_growth(history.kept_bytes - kept_bytes + spare_bytes)
            except QuotaExceeded:
                history.delete_dropped(0)
        self.check_growth(history.kept_bytes - kept_bytes)
        self.accept_history(SessionCall.SET_INPUT, history)
        self.settings.parameters.unused = unused

    def accept_turn_input(self, history: History, unused: Mapping[str, str]) -> BeforeInput:
        """Accept a history with the input of a turn. Return the session before the input, which is
        restored if the turn is refused.
        """
        before = self.before_input()
        self.accept_input(history, unused, before.kept_bytes + TURN_SPARE_BYTES)
        self.conversation.last.before = before
        self.count_kept_bytes()
        return before

    def move_state(self, call: SessionCall) -> None:
        """Do one step of the state table, or raise the error that refuses it."""
        self.conversation.state = step(self.state, call)
        if self.ticket is not None:
            self.ledger.move_ticket(self.ticket, self.state)
            self.ticket = self.ticket if self.active else None

    def accept_history(self, call: SessionCall, history: History) -> None:
        """Do a step of the state table that replaces the history, without a turn."""
        self.move_state(call)
        self.conversation.history_state.replace_history(history)
        self.conversation.last = LastTurn()
        self.count_kept_bytes()
        self.recording.history_changed()

    def before_input(self) -> BeforeInput:
        """Return the part of the session that the next input and turn change."""
        settings, conversation = self.settings, self.conversation.copy()
        conversation.last.before = None
        return BeforeInput(
            conversation,
            tuple(self.recording.shifts),
            settings.parameters.of_turn,
            settings.adapters,
            settings.lora,
            settings.parameters.unused,
            self.rested_at,
            self.turns_begun,
        )

    def restore(self, before: BeforeInput) -> None:
        """Restore the session *before* an input whose turn was refused."""
        self.conversation, settings = before.conversation, self.settings
        settings.parameters.of_turn = before.turn_parameters
        settings.parameters.unused = before.unused
        settings.adapters, settings.lora = before.adapters, before.lora
        self.rested_at, self.turns_begun = before.rested_at, before.turns_begun
        self.count_kept_bytes()
        last = self.conversation.last
        self.recording.history_restored(last.turn, last.begin, before.shifts, last.end)

    def restore_if_refused(self) -> None:
        """Restore the session before the input of the last turn, if that has ended by a refusal."""
        last = self.conversation.last
        if last.turn is not None and last.turn.ended.is_set():
            before, last.before = last.before, None
            if before is not None and last.turn.refused:
                self.restore(before)

    async def wait_recorded(self) -> None:
        """Wait until all changes are in the journal, or writing has failed (`durable` is false)."""
        await self.recording.wait_written()

"""A session: one conversation with one model."""

from __future__ import annotations

from typing import Any

from ...backends.errors import Cancelled, InvalidArgument
from ...backends.params import Options, read_options
from ...scheduler.priority import PRIORITIES
from ..admission.ledger import Ledger
from ..history.retokenize import Vocabulary
from ..history.state import HistoryState
from ..journal.entries import SessionFacts, StoredSession, decode_history
from ..table import SessionCall, SessionState, step
from ..turns.turn_options import Parameters
from ..worker_client import ModelSource
from .core import SessionCore, SessionSettings
from .input import SessionInput
from .model_link import ModelLink
from .outputs import SessionOutputs
from .turn_runner import TurnRunner


class Session(SessionCore):
    """Owned by the daemon's event loop. `input`, `runner`, `outputs` and `link` serve its calls."""

    def __init__(
        self,
        handle: int,
        owner: int,
        model: ModelSource,
        ledger: Ledger,
        settings: SessionSettings,
        session_id: str | None = None,
    ):
        super().__init__(handle, owner, model, ledger, settings, session_id)
        self.link = ModelLink(self)
        self.input = SessionInput(self, self.link)
        self.runner = TurnRunner(self, self.link)
        self.outputs = SessionOutputs(self)

    def __repr__(self) -> str:
        return f"<Session {self.handle:#x} [{self.state} | {len(self.conversation.prompt)} tokens]>"

    # What the journal stores.

    @classmethod
    def from_stored(cls, stored: StoredSession, model: ModelSource, ledger: Ledger) -> Session:
        """Return the dormant session that is in the journal."""
        facts = stored.facts
        parameters = Parameters(facts.defaults)
        parameters.options = dict(facts.options)
        settings = SessionSettings(parameters, PRIORITIES[facts.priority])
        new = cls(0, stored.owner, model, ledger, settings, stored.session_id)
        new.conversation.state = SessionState.DORMANT
        new.conversation.history_state = HistoryState.from_stored(stored)
        new.conversation.vocabulary = Vocabulary(facts.fingerprint, facts.vocabulary)
        begun = [piece.begin.turns for piece in stored.pieces if piece.begin is not None]
        new.turns_begun = max(facts.turns, *begun, 0)
        return new

    @property
    def facts(self) -> SessionFacts:
        """The values that the journal stores beside the history."""
        conversation, parameters = self.conversation, self.settings.parameters
        dormant_tokens = conversation.history_state.dormant_tokens
        return SessionFacts(
            model=self.model.name,
            fingerprint=conversation.vocabulary.fingerprint,
            vocabulary=conversation.vocabulary.hash,
            options=parameters.options,
            defaults=parameters.defaults,
            priority=self.settings.priority.label,
            turns=self.turns_begun,
            tokens=len(conversation.prompt) if dormant_tokens is None else dormant_tokens,
        )

    @property
    def packed(self) -> bytes:
        """The history, as the journal stores it."""
        return self.conversation.history_state.packed

    @property
    def leaves_state(self) -> bool:
        """Whether there may be KV state that serves this session alone: that of other sessions with
        the same tokens is shared, and no file is kept of a session without an id.
        """
        return self.session_id is not None or self.conversation.current_history().shifted

    # Settings.

    def set_options(self, values: dict[str, Any]) -> None:
        """Let parameters hold for this session from the next token on.

        :raises InvalidArgument: a key is unknown, or a value out of its range.
        """
        self.apply_options(read_options(values, strict=True))

    def apply_options(self, options: Options) -> None:
        """Let parameters that were read hold from the next token on; note the others."""
        parameters, turn = self.settings.parameters, self.turn
        parameters.apply(options)
        if turn is not None and self.active:
            turn.adjust(parameters.fill(turn.spec))
        self.recording.facts_changed()

    # Its beginning and its end.

    def branch(self, handle: int, session_id: str | None) -> Session:
        """Return a new session that goes on from here, with a copy of history and settings.

        :raises SessionBusy: a turn is under way.
        """
        step(self.state, SessionCall.FORK)
        settings = self.settings.copy()
        new = Session(handle, self.owner, self.model, self.ledger, settings, session_id)
        new.conversation.vocabulary = self.conversation.vocabulary.branch()
        if self.state is not SessionState.EMPTY:
            new.accept_history(SessionCall.SET_INPUT, self.conversation.current_history())
        else:
            now = self.conversation.history_state.now
            new.conversation.history_state.replace_history(now.copy())
        return new

    def end(self, call: SessionCall, why: str) -> None:
        """End for good by *call* (close, unload, expire): the turn ends, its readers get *why*."""
        self.move_state(call)
        self.runner.end_turn(Cancelled(why))

    def detach(self) -> None:
        """Go dormant: the turn ends, its tokens stand, the history waits for `attach`.

        What is known of them is written to disk, where the session may be.
        """
        unfinished = self.active or self.conversation.last.reader_left
        self.runner.end_turn(Cancelled("the session was detached"))
        piece = self.runner.unfinished_piece() if unfinished else None
        history_state = self.conversation.history_state
        history_state.pack(self.turn, piece)
        self.accept_history(SessionCall.DETACH, self.conversation.current_history())
        client, prompt = self.model.loaded, self.conversation.prompt
        if client is not None and self.settings.persist and prompt:
            client.keep(self.owner, self.name, self.settings.adapters, prompt)
        history_state.make_dormant()

    def attach(self, handle: int, model: ModelSource) -> None:
        """Become active again under a new handle, on a new lease of the same model.

        :raises InvalidArgument: the session is of another model, or of one with other tokens.
        """
        if model.name != self.model.name:
            raise InvalidArgument(
                f"session {self.session_id!r} is of model {self.model.name!r}, not {model.name!r}",
                hint="attach it with its own model, or take another session id",
            )
        client, vocabulary = model.loaded, self.conversation.vocabulary
        entry = decode_history(self.packed)
        has_text = bool(entry.messages) or vocabulary.saved_text is not None
        other = client is not None and vocabulary.differs_from(client.info)
        if other and client is not None and entry.tokens and not has_text:
            raise InvalidArgument(
                f"session {self.session_id!r} has other tokens than model {model.name!r} has now",
                hint="its file was exchanged: take another session id, or forget this one",
                data={
                    "fingerprint": vocabulary.fingerprint,
                    "fingerprint_now": client.info.fingerprint,
                },
            )
        self.move_state(SessionCall.ATTACH)
        self.handle, self.model = handle, model
        self.conversation.history_state.activate()
        self.recording.history_changed()

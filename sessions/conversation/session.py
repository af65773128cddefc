"""A session: one conversation with one model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from ...backends.errors import Cancelled, InvalidArgument, TooLarge
from ...backends.params import BY_SPELLING, Options, nearest, read_options
from ...scheduler.messages import SharedKv
from ...scheduler.owner import Owner
from ...scheduler.priority import PRIORITIES
from ..admission.ledger import Ledger
from ..entries import SessionFacts, StoredSession, decode_history
from ..history.history import History
from ..history.state import HistoryState, HistoryVocabulary
from ..memory import SESSION_BYTES, TOKEN_BYTES, memory_bytes
from ..table import SessionCall, SessionState, step
from ..turn.options import Parameters
from ..worker_client import ModelSource
from .core import SessionCore, SessionSettings
from .input import SessionInput
from .model_link import ModelLink
from .outputs import SessionOutputs
from .titles import checked_title, first_words, opening_of
from .turn_runner import TurnRunner

NOTE_BYTES_MAX = 256 << 10
_NAME_SHOWN_MAX = 100


class SessionOrigin(Protocol):
    """The named state from which a session begins."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def facts(self) -> SessionFacts:
        """Its model, vocabulary and parameters."""

    def new_history(self) -> History:
        """Return a copy of its history."""

    def shared_with(self, owner: Owner) -> SharedKv | None:
        """Return its KV state for a session of another user, or None for the same user."""


@dataclass(eq=False, repr=False)
class Session(SessionCore):
    """One conversation. `input`, `runner`, `outputs` and `link` serve its calls. Owned by the
    daemon's event loop.
    """

    def __post_init__(self) -> None:
        """Create the parts that serve the calls."""
        self.link = ModelLink(self)
        self.input = SessionInput(self, self.link)
        self.outputs = SessionOutputs(self)
        self.runner = TurnRunner(self, self.link, self.outputs)

    def __repr__(self) -> str:
        return f"<Session {self.handle:#x} [{self.state} | {len(self.conversation.prompt)} tokens]>"

    # Stored values.

    @classmethod
    def from_stored(cls, stored: StoredSession, model: ModelSource, ledger: Ledger) -> Session:
        """Return a dormant session from the journal."""
        facts = stored.facts
        parameters = Parameters(facts.defaults)
        parameters.options = dict(facts.options)
        parameters.out_of_range = dict(facts.out_of_range)
        settings = SessionSettings(parameters, PRIORITIES[facts.priority])
        settings.on_behalf_of, settings.note = facts.on_behalf_of, facts.note
        settings.title, settings.kept, settings.undo_s = facts.title, facts.kept, facts.undo_s
        new = cls(0, stored.owner, model, ledger, settings, stored.session_id)
        new.conversation.state = SessionState.DORMANT
        new.conversation.history_state = HistoryState.from_stored(stored)
        new.conversation.vocabulary = HistoryVocabulary(facts.fingerprint, facts.vocabulary)
        new.transfer = facts.transfer
        opening = facts.opening
        if opening is None:  # an earlier version wrote it
            with suppress(msgspec.MsgspecError):  # attaching the session reports it
                opening = opening_of(new.conversation.history_state.unpacked_history().messages)
        settings.opening = opening or ""
        begun = [piece.begin.turns for piece in stored.pieces if piece.begin is not None]
        new.turns_begun = max(facts.turns, *begun, 0)
        return new

    @property
    def facts(self) -> SessionFacts:
        """The values that the journal stores besides the history."""
        conversation, parameters = self.conversation, self.settings.parameters
        dormant_tokens = conversation.history_state.dormant_tokens
        return SessionFacts(
            model=self.model.name,
            fingerprint=conversation.vocabulary.fingerprint,
            vocabulary=conversation.vocabulary.hash,
            options=parameters.options,
            defaults=parameters.defaults,
            out_of_range=parameters.out_of_range,
            priority=self.settings.priority.label,
            turns=self.turns_begun,
            tokens=len(conversation.prompt) if dormant_tokens is None else dormant_tokens,
            on_behalf_of=self.settings.on_behalf_of,
            note=self.settings.note,
            title=self.settings.title,
            opening=self.opening,
            kept=self.settings.kept,
            undo_s=self.settings.undo_s,
            transfer=self.transfer,
        )

    @property
    def packed(self) -> bytes:
        """The history, as the journal stores it."""
        return self.conversation.history_state.packed

    @property
    def history(self) -> History:
        """The history with the output so far, also of a dormant session. It is a copy."""
        if self.state is SessionState.DORMANT:
            return self.conversation.history_state.unpacked_history()
        return self.conversation.current_history()

    @property
    def opening(self) -> str:
        """The beginning of the first message, also of a dormant session."""
        if self.state is SessionState.DORMANT:
            return self.settings.opening
        return opening_of(self.conversation.messages)

    @property
    def title(self) -> str:
        """The title that a client has set, or else the first words of the first message."""
        return self.settings.title or first_words(self.opening)

    @property
    def leaves_state(self) -> bool:
        """Whether there may be KV states of this session alone. Other states are shared by sessions
        with the same tokens, and a session without an id has no files.
        """
        return self.session_id is not None or self.conversation.shifted

    @property
    def can_be_dormant(self) -> bool:
        """Whether the session can become active again after its connection has closed."""
        return self.session_id is not None and self.state is not SessionState.UNLOADED

    # Settings.

    def set_options(self, values: dict[str, Any]) -> None:
        """Set parameters of the session; they apply from the next token on.

        :raises InvalidArgument: a key is unknown, or a value out of its range.
        :raises QuotaExceeded: its owner's sessions would become too large.
        """
        self.apply_options(read_options(values, strict=True))

    def change_options(self, values: dict[str, Any], unset: Sequence[str]) -> None:
        """Set parameters of the session, and remove its own values of those in *unset*.

        :raises InvalidArgument: a key is unknown, or a value out of its range.
        :raises QuotaExceeded: its owner's sessions would become too large.
        """
        options, removed = read_options(values, strict=True), _parameter_names(unset)
        parameters = self.settings.parameters
        before = parameters.options
        parameters.options = {n: v for n, v in before.items() if n not in removed}
        try:
            self.apply_options(options)
        except BaseException:
            parameters.options = before
            raise

    def apply_options(self, options: Options) -> None:
        """Set parameters that were read; note those that do not apply."""
        parameters, turn = self.settings.parameters, self.turn
        self.check_growth(memory_bytes(options.values, options.ignored, options.adjusted))
        parameters.apply(options)
        self.count_kept_bytes()
        if turn is not None and self.active:
            turn.adjust(parameters.fill(turn.spec, turn.client.info.vocab_size))
        self.recording.facts_changed()

    def check_note(self, note: bytes) -> None:
        """Check that a note can be stored.

        :raises TooLarge: it has more than `NOTE_BYTES_MAX` bytes.
        :raises QuotaExceeded: its owner's sessions would become too large.
        """
        if len(note) > NOTE_BYTES_MAX:
            raise TooLarge(
                f"a note of {len(note)} bytes; the limit is {NOTE_BYTES_MAX}",
                hint="store less with the session",
                data={"bytes": len(note), "note_bytes_max": NOTE_BYTES_MAX},
            )
        self.check_growth(len(note) - len(self.settings.note))

    def set_note(self, note: bytes) -> None:
        """Store a note of the client with the session; an empty one deletes it.

        :raises TooLarge: it has more than `NOTE_BYTES_MAX` bytes.
        :raises QuotaExceeded: its owner's sessions would become too large.
        """
        self.check_note(note)
        self.settings.note = note
        self.count_kept_bytes()
        self.recording.facts_changed()

    def set_title(self, title: str) -> None:
        """Set the title; an empty one is replaced by the first words of the first message.

        :raises InvalidArgument: it is too long.
        """
        self.settings.title = checked_title(title)
        self.count_kept_bytes()
        self.recording.facts_changed()

    # Branching, ending, dormancy.

    def branch(self, handle: int, session_id: str | None) -> Session:
        """Return a new session with a copy of history and settings.

        :raises SessionBusy: a turn is under way.
        """
        step(self.state, SessionCall.FORK)
        settings = self.settings.copy()
        new = Session(handle, self.owner, self.model, self.ledger, settings, session_id)
        new.conversation.vocabulary = self.conversation.vocabulary.branch()
        history = self.conversation.current_history()
        if self.state is SessionState.EMPTY:
            new.conversation.history_state.replace_history(history)
        else:
            new.accept_history(SessionCall.SET_INPUT, history)
            new.conversation.last.overlong = self.conversation.last.overlong
        return new

    def begin_from(self, origin: SessionOrigin) -> None:
        """Begin a new session with the history and the options of its *origin*.

        :raises InvalidArgument: it has another model, or its model has another vocabulary.
        :raises QuotaExceeded: its owner's open sessions would become too large.
        """
        facts, history = origin.facts, origin.new_history()
        if facts.model != self.model.name:
            raise InvalidArgument(
                f"state {origin.name!r} has model {facts.model!r}, not {self.model.name!r}",
                hint="open the session with the state's model",
            )
        vocabulary = HistoryVocabulary(facts.fingerprint, facts.vocabulary)
        if history.prompt and not history.messages:
            vocabulary.check_model(self.model, f"state {origin.name!r}", "save another state")
        self.check_growth(SESSION_BYTES + history.kept_bytes)
        self.settings.parameters.options = dict(facts.options)
        self.settings.shared_kv = origin.shared_with(self.owner)
        self.conversation.vocabulary = vocabulary
        if history.prompt:
            self.accept_history(SessionCall.SET_INPUT, history)
        else:
            self.conversation.history_state.replace_history(history)

    def end(self, call: SessionCall, why: str) -> None:
        """End by *call* (close, unload, expire): cancel the turn, whose reader gets *why*."""
        self.move_state(call)
        self.runner.end_turn(Cancelled(why))

    def unload(self) -> None:
        """Separate the session from its model; its output can still be read."""
        self.end(SessionCall.UNLOAD, "the graph was unloaded")

    def detach(self) -> None:
        """Become dormant: cancel the turn, keep its tokens, pack the history for `attach`. If the
        session persists, its KV state is written to disk.
        """
        self.conversation.last.reader_left |= self.active
        self.settings.opening = self.opening
        self.runner.end_turn(Cancelled("the session was detached"))
        piece = self.runner.resumable_piece()
        history_state = self.conversation.history_state
        history_state.pack(self.turn, piece)
        self.accept_history(SessionCall.DETACH, self.conversation.current_history())
        client, prompt = self.model.loaded, self.conversation.prompt
        if client is not None and self.settings.persist and prompt:
            client.save_session(self.owner, self.name, self.settings.adapters, prompt)
        history_state.make_dormant()

    def check_model(self, model: ModelSource) -> None:
        """Check that the session has this model.

        :raises InvalidArgument: it has another one.
        """
        if model.name != self.model.name:
            raise InvalidArgument(
                f"session {self.session_id!r} has model {self.model.name!r}, not {model.name!r}",
                hint="attach it with its own model, or use another session id",
            )

    def attach(self, handle: int, model: ModelSource) -> None:
        """Become active again under a new handle, on a new lease of the same model.

        :raises InvalidArgument: the session has another model, or its model has another vocabulary.
        :raises QuotaExceeded: its owner's open sessions would become too large.
        """
        self.check_model(model)
        entry = decode_history(self.packed)
        if entry.tokens and not entry.messages:
            whose, instead = f"session {self.session_id!r}", "use another session id"
            self.conversation.vocabulary.check_model(model, whose, instead)
        counted = self.ledger.kept_bytes.bytes_of(self)  # of a kept session
        self.check_growth(self.kept_bytes + TOKEN_BYTES * self.conversation.size - counted)
        self.move_state(SessionCall.ATTACH)
        self.handle, self.model = handle, model
        self.conversation.history_state.activate()
        self.recording.history_changed()


def _parameter_names(spellings: Sequence[str]) -> set[str]:
    """Return the names of parameters in any spelling.

    :raises InvalidArgument: one is unknown.
    """
    names = set()
    for spelling in spellings:
        found = BY_SPELLING.get(spelling.lower().replace("_", "-"))
        if found is None:
            shown = spelling[:_NAME_SHOWN_MAX]
            close = nearest(spelling, BY_SPELLING) if len(spellings) == 1 else ""
            raise InvalidArgument(f"unknown key {shown!r}; {close}".rstrip("; "))
        names.add(found.name)
    return names

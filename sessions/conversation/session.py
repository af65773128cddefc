"""A session: one conversation with one model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import msgspec
from msgspec import UNSET
from structlog.contextvars import get_contextvars

from ...backends import Rendering
from ...backends.encoder_prompts import as_prompt
from ...backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    NotFound,
    PromptTooLong,
    QuotaExceeded,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from ...backends.media import MediaItem, media_parts
from ...backends.params import BY_SPELLING, Options, OverflowPolicy, nearest, read_options
from ...scheduler import messages as m
from ...scheduler.messages import SharedKv
from ...scheduler.owner import PRIORITIES, Owner, Requester
from ...wire.metadata import Metadata
from ..admission.bounds import Ticket
from ..admission.ledger import Ledger
from ..answers.calls import ToolUse
from ..answers.splitter import AnswerParts, AnswerSplitter
from ..entries import (
    Replay,
    SessionFacts,
    StoredSession,
    Transfer,
    TurnBegin,
    TurnEnd,
    TurnPiece,
    decode_history,
    encode,
)
from ..history.history import NOT_RECOMPUTED, History
from ..history.infill import InfillBudget, InfillText, check_infill, infill_prompt, texts_of
from ..history.media import Prompt, mark_prompt, prompt_bytes
from ..history.overflow import ContextLimit
from ..history.recent import RecentChats
from ..history.state import HistoryState, HistoryVocabulary
from ..identity import checked_title, first_words, name_of_id, opening_of
from ..journal.journal import Recording
from ..memory import SESSION_BYTES, TOKEN_BYTES, memory_bytes
from ..table import ACTIVE, SessionCall, SessionState, step
from ..turn.options import (
    CHAT_TEMPLATE,
    NO_OPTIONS,
    NO_SAMPLING,
    NO_TEMPLATE,
    Parameters,
    TurnOptions,
    check_prompt_logprobs,
    chosen_keys,
    rendering_of,
    resumed,
    scales_by_name,
)
from ..turn.turn import ProgressSink, TokensSink, Turn
from ..worker_client import ModelSource, WorkerClient, retry_query
from .outputs import DETACHED, describe_turn, embedding_json, new_splitter, resume_splitter
from .state import (
    TITLE_BYTES,
    TURN_SPARE_BYTES,
    BeforeInput,
    Conversation,
    LastTurn,
    Overlong,
    SessionSettings,
    SessionTensors,
)

T = TypeVar("T")
DRAFT = "draft"
NO_DRAFTS_OF_MEDIA = "the draft model reads no images or sounds: this turn has no drafts"
NOTE_BYTES_MAX = 256 << 10
MESSAGES_BYTES_MAX = 8 << 20
"""Bound on the memory of one history's messages, because each turn sends all of them to the worker,
for the template.
"""
_NAME_SHOWN_MAX = 100


@dataclass(eq=False, repr=False)
class Session:
    """One conversation, with one turn at a time. Owned by the daemon's event loop."""

    handle: int
    owner: Owner
    model: ModelSource
    ledger: Ledger
    settings: SessionSettings
    session_id: str | None = None
    recent: RecentChats | None = None
    """The chats that it may continue, of sessions that have ended; None if it has an id."""
    conversation: Conversation = field(init=False, default_factory=Conversation)
    recording: Recording = field(init=False, default_factory=Recording)
    tensors: SessionTensors = field(init=False, default_factory=SessionTensors)
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
    _sent: Sequence[dict[str, Any]] = field(init=False, default=())
    """The messages with which its chat began."""
    _released: bool = field(init=False, default=False)
    """Whether it no longer holds images and sounds, because it has ended."""
    _sent_whole: bool = field(init=False, default=False)
    """Whether its chat has no other messages, except the answer to them."""
    _lock: anyio.Lock = field(init=False, default_factory=anyio.Lock)
    """Held by each call that uses the model."""
    _starting: anyio.Lock = field(init=False, default_factory=anyio.Lock)
    """Held from the input of a turn until its start."""

    def __repr__(self) -> str:
        return f"<Session {self.handle:#x} [{self.state} | {len(self.conversation.prompt)} tokens]>"

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
        return self.conversation.last.turn

    # Memory.

    @property
    def kept_bytes(self) -> int:
        settings = self.settings
        options = settings.parameters.kept_bytes + memory_bytes(settings.adapters, settings.lora)
        texts = len(settings.note) + TITLE_BYTES * len(settings.title + settings.opening)
        kept = self.conversation.kept_bytes + self.tensors.kept_bytes
        return SESSION_BYTES + options + texts + kept

    @property
    def branch_bytes(self) -> int:
        """The memory that a branch would take. It lacks the note, the tensors, and the state before
        the last input, which only the session itself can restore.
        """
        before = self.conversation.last.before
        own = len(self.settings.note) + self.tensors.kept_bytes
        own += 0 if before is None else before.kept_bytes
        return self.kept_bytes - own

    def check_growth(self, more: int) -> None:
        """Check that the session may keep *more* bytes.

        :raises QuotaExceeded: its owner's bound would be exceeded.
        """
        self.ledger.kept_bytes.check_growth(self.owner, more)

    def count_kept_bytes(self) -> None:
        """Count the session's present size to its owner, and hold its images and sounds."""
        self.ledger.kept_bytes.set_bytes(self, self.kept_bytes)
        self.hold_contents()

    @property
    def contents(self) -> frozenset[bytes]:
        """The hashes of the contents of its images and sounds, also of a dormant session."""
        conversation, before = self.conversation, self.conversation.last.before
        found = conversation.history_state.contents
        return found if before is None else found | before.conversation.history_state.contents

    def hold_contents(self) -> None:
        """Let the media store keep the session's images and sounds, and those that the journal may
        still name.
        """
        if not self._released:
            media, contents = self.ledger.media, self.contents
            if self.recording.is_stored:
                contents |= media.held_by(self)
            media.hold(self, self.owner.user, contents)

    def release_contents(self) -> None:
        """Let the images and sounds of an ended session go, which is not stored."""
        self._released = True
        self.ledger.media.release(self)

    # Stored values.

    @classmethod
    def from_stored(cls, stored: StoredSession, model: ModelSource, ledger: Ledger) -> Session:
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
            media=tuple(sorted(conversation.history_state.contents)),
        )

    @property
    def packed(self) -> bytes:
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

    async def wait_recorded(self) -> None:
        """Wait until all changes are in the journal, or writing has failed (`durable` is false)."""
        await self.recording.wait_written()
        if self.recording.is_written and not self._released:
            self.ledger.media.hold(self, self.owner.user, self.contents)

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
            spec = parameters.fill(turn.spec, turn.client.info.vocab_size)
            turn.adjust(parameters.bound_answer(spec, self.model.ceilings))
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

    # The model.

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until turns of the model are not held back, then lock the session."""
        while True:
            await self.model.released()
            async with self._lock:
                if not self.model.held:
                    yield
                    return

    async def _query(
        self, query: Callable[[WorkerClient], Awaitable[T]], *, new_history: bool = False
    ) -> T:
        """Return the result of *query* on the worker; see `retry_query`.

        :raises WorkerCrashed: the query's input crashed the worker, or too many workers have died.
        """
        return await retry_query(lambda: self.ready_client(new_history=new_history), query)

    async def ready_client(self, *, new_history: bool = False) -> WorkerClient:
        """Return the worker client. A history whose tokens are of the model before a swap is
        retokenized, unless the caller replaces it by a *new_history*.
        """
        client = await self.model.ready()
        at_rest = not self.active and self.conversation.size > 0
        other = self.conversation.vocabulary.differs_from(client.info)
        if other and at_rest and not new_history:
            history = self.conversation.current_history()
            texts = client.texts_of(self.requester)
            await self.conversation.vocabulary.retokenize(
                *(self.model, texts, history, self.requester), refuses_unread=self._refuses_unread
            )
            conversation = self.conversation  # another one, if it was rolled back meanwhile
            conversation.history_state.replace_history(history)
            conversation.last = replace(conversation.last, turn=None)
            self.recording.history_changed()
        self.conversation.vocabulary.set_model(client.info)
        return client

    @property
    def _refuses_unread(self) -> bool:
        """Whether a history whose images and sounds the model cannot read is refused."""
        return self.ledger.media.limits.refuses_unread

    async def prepare_migration(self, *, also_text: bool) -> None:
        """Wait until a call that uses the model before a swap has ended. With *also_text*, save the
        text of a history whose tokens are of that model.

        :raises InferdError: that model cannot detokenize it.
        """
        async with self._lock:
            present, before = self.conversation, self.conversation.last.before
            for kept in (present,) if before is None else (present, before.conversation):
                if also_text and kept.size:
                    history = kept.current_history()
                    await kept.vocabulary.save_text(self.model, history, self.requester)

    async def count_cached_tokens(self) -> int:
        """Return how many of the history's tokens are in a KV state now."""
        client = self.model.loaded
        if client is None:
            return 0
        tokens = self.conversation.tokens()
        try:
            return await client.count_cached_tokens(
                self.owner, self.name, self.settings.adapters, tokens
            )
        except WorkerCrashed:
            return 0

    def check_model(self, model: ModelSource) -> None:
        """Check that the session has this model.

        :raises InvalidArgument: it has another one.
        """
        if model.name != self.model.name:
            raise InvalidArgument(
                f"session {self.session_id!r} has model {self.model.name!r}, not {model.name!r}",
                hint="attach it with its own model, or use another session id",
            )

    # Changes of the state and the history.

    def move_state(self, call: SessionCall) -> None:
        """Do one step of the state table, or raise the error that refuses it."""
        self.conversation.state = step(self.state, call)
        if self.ticket is not None:
            self.ledger.move_ticket(self.ticket, self.state)
            self.ticket = self.ticket if self.active else None

    def accept_history(self, call: SessionCall, history: History) -> None:
        """Do a step of the state table that replaces the history, without a turn."""
        self.move_state(call)
        self.tensors.clear()
        self.conversation.history_state.replace_history(history)
        self.conversation.last = LastTurn()
        self.count_kept_bytes()
        self.recording.history_changed()

    def _accept_input(
        self, history: History, unused: Mapping[str, str], spare_bytes: int = 0
    ) -> None:
        """Accept a history with new input; the parameters *unused* have no effect on its turn.
        Messages that the model no longer reads are deleted, if the user's memory does not suffice
        for them and for *spare_bytes* more.

        :raises QuotaExceeded: its owner's sessions would become too large.
        :raises TooLarge: it would have too many images and sounds, or too many bytes of them.
        """
        kept_bytes = self.conversation.history_state.kept_bytes
        if history.dropped_bytes:
            try:
                self.check_growth(history.kept_bytes - kept_bytes + spare_bytes)
            except QuotaExceeded:
                history.delete_dropped(0)
        self.check_growth(history.kept_bytes - kept_bytes)
        self.ledger.media.check_session(self.owner.user, history.contents)
        self.accept_history(SessionCall.SET_INPUT, history)
        self.settings.parameters.unused = unused

    def _accept_turn_input(self, history: History, unused: Mapping[str, str]) -> BeforeInput:
        """Accept a history with the input of a turn. Return the session before the input, which is
        restored if the turn is refused.
        """
        before = self._before_input()
        self._accept_input(history, unused, before.kept_bytes + TURN_SPARE_BYTES)
        self.conversation.last.before = before
        self.count_kept_bytes()
        return before

    def _before_input(self) -> BeforeInput:
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

    def _restore(self, before: BeforeInput) -> None:
        """Restore the session *before* an input whose turn was refused."""
        self.conversation, settings = before.conversation, self.settings
        settings.parameters.of_turn = before.turn_parameters
        settings.parameters.unused = before.unused
        settings.adapters, settings.lora = before.adapters, before.lora
        self.rested_at, self.turns_begun = before.rested_at, before.turns_begun
        self.count_kept_bytes()
        last = self.conversation.last
        self.recording.history_restored(last.turn, last.begin, before.shifts, last.end)

    def _restore_if_refused(self) -> None:
        """Restore the session before the input of the last turn, if that has ended by a refusal."""
        last = self.conversation.last
        if last.turn is not None and last.turn.ended.is_set():
            before, last.before = last.before, None
            if before is not None and last.turn.refused:
                self._restore(before)

    # Input.

    async def set_input(self, text: Prompt) -> int:
        """Make *text* the prompt, or append it to the history; return the number of its tokens. For
        a text too long for any context, return the least number that it can have; the next turn is
        refused. Images and sounds in it are in the stored form of parts of messages.

        :raises SessionBusy: a turn is under way.
        """
        async with self.exclusive():
            appends = bool(self.settings.parameters.standing("append"))
            before, overlong = self.conversation.last.overlong, None
            try:
                history, tokens, unused, appends = await self._with_text(text, appends=appends)
            except PromptTooLong as exc:
                tokens, unused = exc.data["prompt_tokens"], NO_TEMPLATE
                history = self.conversation.current_history() if appends else History()
                overlong = Overlong(prompt_bytes(text), tokens, exc.data["ctx_size"])
            if appends and before is not None:
                size, tokens = before.size + prompt_bytes(text), before.tokens + tokens
                overlong = before._replace(size=size, tokens=tokens)
                history = self.conversation.current_history()
            self._accept_input(history, unused)
            self.conversation.last.overlong = overlong
        await self.wait_recorded()
        return tokens

    async def add_text(self, text: Prompt, options: Mapping[str, Any] = NO_OPTIONS) -> BeforeInput:
        """Append *text* to the history, for a turn with *options*; return the session before the
        input. Images and sounds in it are in the stored form of parts of messages.

        :raises SessionBusy: a turn is under way.
        :raises PromptTooLong: no context holds it.
        """
        async with self.exclusive():
            overlong = self.conversation.last.overlong
            if overlong is not None:
                raise overlong.error(len(self.conversation.prompt))
            history, _, unused, _ = await self._with_text(text, options, appends=True)
            before = self._accept_turn_input(history, unused)
        return await self._record_input(before)

    async def add_tokens(self, tokens: list[int]) -> BeforeInput:
        """Append token ids to the history, for a turn; return the session before the input.

        :raises SessionBusy: a turn is under way.
        :raises InvalidArgument: there are none, or one is not in the model's vocabulary.
        """
        async with self.exclusive():
            overlong = self.conversation.last.overlong
            if overlong is not None:
                raise overlong.error(len(self.conversation.prompt))
            step(self.state, SessionCall.SET_INPUT)
            append = bool(self.conversation.prompt)
            tokens, append, unused = await self._query(
                lambda c: _checked_tokens(c, tokens, append=append), new_history=not append
            )
            history = self.conversation.current_history()
            history.append_tokens(tokens) if append else history.replace_tokens(tokens)
            before = self._accept_turn_input(history, unused)
        return await self._record_input(before)

    async def add_infill(
        self, text: InfillText, options: Mapping[str, Any] = NO_OPTIONS
    ) -> BeforeInput:
        """Replace the history by the prompt of a place to fill in, for a turn with *options*.
        Return the session before the input.

        :raises SessionBusy: a turn is under way.
        :raises UnsupportedOperation: the model does not fill in text between two others.
        """
        async with self.exclusive():
            step(self.state, SessionCall.SET_INPUT)
            tokens, unused = await self._query(
                lambda c: self._infill_tokens(c, text, options), new_history=True
            )
            history = self.conversation.current_history()
            history.replace_tokens(tokens)
            before = self._accept_turn_input(history, unused)
        return await self._record_input(before)

    async def _infill_tokens(
        self, client: WorkerClient, text: InfillText, options: Mapping[str, Any]
    ) -> tuple[list[int], Mapping[str, str]]:
        info = client.info
        names = check_infill(info, self.model.name)
        limit = self.settings.parameters.context_limit(options, info.ctx_size, chat=False)
        budget = InfillBudget.of_context(limit.ctx_size, limit.n_predict)
        texts = client.texts_of(self.requester)
        begin, *parts = await texts.tokenize_parts(texts_of(text, budget, info))
        tokens = infill_prompt(parts, names, budget, begin=begin, suffix_first=text.suffix_first)
        return tokens, info.unused | NO_TEMPLATE

    async def add_messages(
        self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS
    ) -> BeforeInput:
        """Add chat messages to the history by the model's template, which gets the parameters of a
        turn with *options*. After raw text, begin a new history. Return the session before the
        input.
        """
        parameters = self.settings.parameters
        rendering = parameters.rendering(options)
        continues = bool(parameters.in_turn("continue-final-message", options))
        async with self.exclusive():
            step(self.state, SessionCall.SET_INPUT)
            if not self.conversation.messages:
                messages = parameters.with_system_prompt(messages)
            self._check_messages(messages)
            history, unused = await self._query(
                lambda c: self._with_messages(
                    *(c, messages, rendering_of(c, self.model.name, rendering)),
                    parameters.tool_use(options, c.info.by_name(self.model.name).answer_form),
                    parameters.context_limit(options, c.info.ctx_size, chat=True),
                    continues=continues,
                )
            )
            before = self._accept_turn_input(history, unused)
            if self.recent is not None:
                begins = not before.conversation.size
                self._sent = messages if begins else self._sent
                self._sent_whole = begins
        return await self._record_input(before)

    async def _with_text(
        self, text: Prompt, options: Mapping[str, Any] = NO_OPTIONS, *, appends: bool
    ) -> tuple[History, int, Mapping[str, str], bool]:
        """Return the history with *text*, the number of the text's tokens, the unused parameters,
        and whether text is appended. Each prompt of an encoder-decoder replaces the history.
        """
        step(self.state, SessionCall.SET_INPUT)
        append = appends and bool(self.conversation.prompt)
        tokens, items, encodes, unused = await self._query(
            lambda c: self._tokenize(c, text, options, append=append), new_history=not append
        )
        history = self.conversation.current_history()
        added = append and not encodes
        history.append_tokens(tokens, items) if added else history.replace_tokens(tokens, items)
        return history, len(tokens), unused, appends and not encodes

    async def _tokenize(
        self, client: WorkerClient, text: Prompt, options: Mapping[str, Any], *, append: bool
    ) -> tuple[list[int], list[MediaItem], bool, Mapping[str, str]]:
        encodes = client.info.decoder_start_token is not None
        texts = client.texts_of(self.requester)
        limit = self.settings.parameters.context_limit(options, client.info.ctx_size, chat=False)
        prompt = await mark_prompt(texts, text)
        tokens = await texts.tokenize(
            prompt.text,
            special=True,
            bos=encodes or not append,
            turn=True,
            cut_behind=limit.cut_behind,
            media=prompt.media,
        )
        return tokens, prompt.items, encodes, client.info.unused | NO_TEMPLATE

    async def _with_messages(
        self,
        client: WorkerClient,
        messages: Sequence[dict[str, Any]],
        rendering: Rendering,
        tool_use: ToolUse,
        limit: ContextLimit,
        *,
        continues: bool,
    ) -> tuple[History, Mapping[str, str]]:
        history, texts = self.conversation.current_history(), client.texts_of(self.requester)
        if continues and client.info.decoder_start_token is not None:
            raise UnsupportedOperation(
                "the model is an encoder-decoder, which begins each answer itself",
                hint="leave continue-final-message out",
            )
        continued = None
        if not continues:
            continued = await self._with_recent_chat(client, messages, rendering, tool_use, limit)
        if continued is None:
            await history.add_messages(
                *(texts, messages, rendering, tool_use, limit),
                refuses_unread=self._refuses_unread,
                continues=continues,
            )
        else:
            history = continued
        if client.info.decoder_start_token is not None:
            history.recomputed = NOT_RECOMPUTED  # no prompt continues the previous one
        info = client.info.by_name(self.model.name)
        return history, info.unused | _notes_on(history.messages, info.chat_notes)

    async def _with_recent_chat(
        self,
        client: WorkerClient,
        messages: Sequence[dict[str, Any]],
        rendering: Rendering,
        tool_use: ToolUse,
        limit: ContextLimit,
    ) -> History | None:
        """Return the history of a recent chat that *messages* continue, with all of them, or None.
        Turns are not dropped from it: which ones may be dropped depends on the whole input.
        """
        if self.recent is None or self.conversation.size or self.conversation.messages:
            return None
        found = self.recent.find(self.owner, client.info.fingerprint, messages)
        if found is None:
            return None
        history, known = found
        whole = replace(limit, policy=OverflowPolicy.ERROR) if limit.drops_turns else limit
        texts = client.texts_of(self.requester)
        try:
            await history.add_messages(texts, messages[known:], rendering, tool_use, whole)
        except (InvalidArgument, PromptTooLong, TooLarge, UnsupportedOperation):
            return None  # the same is reported of the whole input
        except InferdError as exc:
            if isinstance(item := exc.data.get("item"), int):  # it counts in the new messages
                exc.data["item"] = item + sum(1 for _ in media_parts(messages[:known]))
            raise
        return None if limit.needs_drop(len(history.prompt)) else history

    def _check_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Check the size of a history with *messages*, before the template renders them.

        :raises TooLarge: the history's messages would exceed `MESSAGES_BYTES_MAX`.
        :raises QuotaExceeded: the owner's sessions would become too large.
        """
        history, more = self.conversation.history_state.now, memory_bytes(messages)
        before = history.messages_bytes - history.dropped_bytes
        if before + more > MESSAGES_BYTES_MAX:
            raise TooLarge(
                f"the history's messages have {before} bytes, {more} more were to be added; the"
                f" limit is {MESSAGES_BYTES_MAX}",
                hint="reset or rewind the context, or use shorter messages",
                data={"bytes": before, "more": more, "messages_bytes_max": MESSAGES_BYTES_MAX},
            )
        self.check_growth(more - history.dropped_bytes)  # these can be deleted

    async def _record_input(self, before: BeforeInput) -> BeforeInput:
        async with self._rolled_back_if_refused(before):
            await self.wait_recorded()
        return before

    @contextlib.asynccontextmanager
    async def turn_input(
        self, add_input: Callable[[], Awaitable[BeforeInput | None]]
    ) -> AsyncIterator[None]:
        """Add the input of a turn, which is to start in the context. Another call's input waits;
        otherwise this turn would answer it, and neither could be rolled back.
        """
        async with self._starting, self._rolled_back_if_refused(await add_input()):
            yield

    @contextlib.asynccontextmanager
    async def _rolled_back_if_refused(self, before: BeforeInput | None) -> AsyncIterator[None]:
        """Restore the session *before* an input if the context raises an error and no turn has
        begun on the input, because a client that retries sends it again. If the engine refuses the
        turn later, `_restore_if_refused` does the same.
        """
        try:
            yield
        except BaseException:
            last = self.conversation.last
            begun = last.before is not before or last.turn is not None
            if before is not None and not begun and self.state is SessionState.READY:
                self._restore(before)
            await self.wait_recorded()
            raise

    def reset_history(self, system: str | None = None) -> None:
        """Clear the history; *system* becomes the first message of the next one."""
        self.accept_history(SessionCall.RESET, History(system))

    async def rewind_history(self, turns: int | None, tokens: int | None) -> None:
        """Rewind by *turns*, or to the first *tokens* tokens; one of them is None.

        :raises SessionBusy: a turn is under way.
        :raises InvalidArgument: the history is shorter.
        """
        async with self.exclusive():
            step(self.state, SessionCall.REWIND)
            if self.conversation.vocabulary.saved_text is not None:
                await self.ready_client()  # the saved text is that of the whole history
            history = self.conversation.current_history()
            if turns is not None:
                history.rewind_turns(turns)
            else:
                history.rewind_tokens(tokens or 0)
            call = SessionCall.REWIND if history.prompt else SessionCall.RESET
            self.accept_history(call, history)
        await self.wait_recorded()

    # Turns.

    async def start_turn(
        self,
        call: TurnOptions,
        on_tokens: TokensSink | None = None,
        on_progress: ProgressSink | None = None,
    ) -> Turn:
        """Queue a turn on the present prompt.

        :raises Busy: too many tasks wait; `retry_after_s` says when to retry.
        """
        async with self.exclusive():
            client = await self._client_for_turn(embeds=call.embeds)
            turn = self._begin_turn(client, call, on_tokens, on_progress)
            await self._write_beginning()
            if not turn.ended.is_set():
                self._submit(turn)
            return turn

    async def resume_turn(
        self,
        call: TurnOptions,
        tokens: Sequence[int],
        text: bytes,
        on_tokens: TokensSink | None = None,
        on_progress: ProgressSink | None = None,
    ) -> Turn:
        """Continue the interrupted turn with its own options and seed. Its reader has *tokens* and
        *text* of it; the rest of its output is sent first.

        :raises InvalidArgument: no turn was interrupted, or the reader's output differs.
        """
        async with self.exclusive():
            client = await self._client_for_turn()
            history_state, size = self.conversation.history_state, client.info.vocab_size
            so_far, options = resumed(history_state.resumable, call, tokens, text, size)
            before = self._before_input()
            history_state.now = history_state.before
            try:
                turn = self._begin_turn(client, options, on_tokens, on_progress, so_far)
            except BaseException:
                history_state.now = before.conversation.history_state.now
                raise
            self.conversation.last.before = before
            await self._write_beginning()
            if turn.ended.is_set():
                return turn
            self._submit(turn)
            missed_tokens, missed_text = so_far.tokens[len(tokens) :], so_far.text[len(text) :]
            if on_tokens is not None and (missed_tokens or missed_text):
                on_tokens(m.Tokens(turn.spec.id, missed_tokens, missed_text))
            return turn

    async def _client_for_turn(self, *, embeds: bool = False) -> WorkerClient:
        """Return the worker client, if a turn may begin. With *embeds*, reserve memory for
        embeddings if the parameters request them.
        """
        step(self.state, SessionCall.COMPUTE)  # refuses a second turn, even for a pull turn
        client = await self.ready_client()
        if embeds and self.settings.parameters.standing("embedding"):
            await client.reserve_embedding_memory()
            client = await self.ready_client()  # the model may have been loaded again for it
        step(self.state, SessionCall.COMPUTE)  # it may have been closed or reset meanwhile
        return client

    def _begin_turn(
        self,
        client: WorkerClient,
        call: TurnOptions,
        on_tokens: TokensSink | None,
        on_progress: ProgressSink | None,
        resumes: Replay | None = None,
    ) -> Turn:
        """Return a new turn on the present history, not yet submitted to the worker. It may
        continue the interrupted turn *resumes*; otherwise a history that exceeds the context is
        shortened first, as the parameter `overflow` says.

        :raises Busy: too many tasks wait.
        """
        history_state = self.conversation.history_state
        whole = history_state.now
        try:
            limit = None if resumes else self._shorten_history(client, call)
            turn = self._begin_fitted_turn(client, call, on_tokens, on_progress, resumes, limit)
        except BaseException:
            history_state.now = whole
            raise
        if limit is not None:
            history_state.before = history_state.now
        return turn

    def _shorten_history(self, client: WorkerClient, call: TurnOptions) -> ContextLimit | None:
        """Drop tokens of a history that exceeds the context. Return the limit that it exceeded, or
        None.
        """
        conversation, parameters = self.conversation, self.settings.parameters
        history = conversation.history_state.now
        if conversation.last.overlong is not None:
            return None
        size, chat = client.info.ctx_size, bool(history.messages)
        limit = parameters.context_limit(call.options, size, chat=chat)
        conversation.history_state.now = history.fitted(limit)
        return None if conversation.history_state.now is history else limit

    def _begin_fitted_turn(
        self,
        client: WorkerClient,
        call: TurnOptions,
        on_tokens: TokensSink | None,
        on_progress: ProgressSink | None,
        resumes: Replay | None,
        exceeded: ContextLimit | None,
    ) -> Turn:
        ledger, conversation = self.ledger, self.conversation
        self.check_growth(memory_bytes(call.options, call.notes.ignored, call.notes.out_of_range))
        try:
            spec = self._new_task(client, call)
        finally:
            self.count_kept_bytes()  # the session keeps the options, even of a refused turn
        if exceeded is not None and (reason := exceeded.kept_reason):
            self.settings.parameters.adjusted["n-keep"] = reason
        if unread := conversation.history_state.now.unread:
            self.settings.parameters.adjusted["media"] = unread
        if spec.media and spec.speculation == DRAFT:
            self.settings.parameters.adjusted["speculation"] = NO_DRAFTS_OF_MEDIA
        self.settings.adapters = spec.adapters
        self.settings.lora = scales_by_name(client.adapters, spec.adapters)
        if spec.embed is not None and not call.embeds:
            raise UnsupportedOperation(
                "the context makes embeddings; this call generates text",
                hint="use compute and get_output, or set the parameter embedding to false",
            )
        if conversation.last.overlong is not None:
            raise conversation.last.overlong.error(len(conversation.prompt), spec.ctx_size)
        self.check_growth(len(spec.tokens))
        ticket = Ticket(
            self.owner,
            self.model.base,
            client.info.slots,
            spec.priority,
            len(conversation.prompt),
            spec.n_predict,
            -1 if spec.reasoning is None else spec.reasoning.budget,
            quota_checked=call.quota_checked,
        )
        ledger.admit_turn(ticket)
        self.ticket = ticket
        self.move_state(SessionCall.COMPUTE_SINGLE if call.pull else SessionCall.COMPUTE)
        self.tensors.outputs = []
        sink, compare = self.recording.watch_tokens(on_tokens), self.model.compare
        turn = Turn(client, spec, self._engine_event, sink, on_progress, compare)
        turn.key = self.settings.key
        ticket.output = turn.tokens
        self.turns_begun += resumes is None  # a resumed turn keeps its number
        self.turn_at = ledger.seconds()
        begin = TurnBegin(
            options=call.options,
            seed=self.settings.parameters.seed,
            priority=spec.priority.label,
            special=spec.special,
            turns=self.turns_begun,
        )
        conversation.last = LastTurn(turn, begin, before=conversation.last.before)
        self.count_kept_bytes()
        if conversation.history_state.resumable is not None or exceeded is not None:
            conversation.history_state.resumable = None
            self.recording.history_changed()  # it includes the previous turn, or was shortened
        if resumes is not None:
            turn.take_over(resumes)
            ticket.resumed_tokens = len(turn.tokens)
        if turn.generates:
            shifts = () if resumes is None else resumes.placed_shifts
            self.recording.turn_began(turn, begin, shifts)
        for listener in ledger.turn_listeners:
            listener.turn_began(self.model, turn, chat=bool(conversation.messages))
        return turn

    def _new_task(self, client: WorkerClient, call: TurnOptions) -> m.TaskSpec:
        """Return the task of a turn that starts now on the present prompt.

        :raises InvalidArgument: an option or an adapter is unknown, a value is out of its range, or
            there would be too many logprobs of the prompt.
        """
        settings, history = self.settings, self.conversation.history_state.now
        parameters, shared_kv = settings.parameters, settings.shared_kv
        requested = settings.priority if call.priority is None else call.priority
        ceilings = self.model.ceilings
        parameters.set_turn_options(call.options, call.notes)
        tokens = m.pack_tokens(history.prompt)
        if shared_kv is not None and not shared_kv.begins(tokens):
            shared_kv = None  # the session began with it, but its prompt no longer does
        spec = m.TaskSpec(
            id=self.ledger.new_task_id(),
            owner=self.owner,
            account=self.ledger.bounds.gateway_of(self.owner.user),
            tokens=tokens,
            sampling=NO_SAMPLING,
            priority=min(requested, ceilings.priority_max),
            pull=call.pull,
            credit=call.credit,
            special=call.special,
            shown_marks=history.tool_use.shown_marks,
            queue_timeout_s=call.queue_timeout_s,
            total_timeout_s=call.timeout_s,
            session=self.name,
            persist=settings.persist and self.session_id is not None,
            shared_kv=shared_kv,
            watch=call.watch,
            watch_prompt=call.watch_prompt,
            request=str(get_contextvars().get("request", "")),
            media=history.items,
            continued=history.continued_tokens,
        )
        spec = parameters.fill(spec, client.info.vocab_size)
        if spec.embed is not None and call.shared_tokens:
            embed = msgspec.structs.replace(spec.embed, shared=call.shared_tokens)
            spec = msgspec.structs.replace(spec, embed=embed)
        if spec.embed is not None and spec.media:
            raise UnsupportedOperation(
                "embeddings are made of texts only", hint="leave the images and sounds out"
            )
        spec = msgspec.structs.replace(spec, stop=(*spec.stop, *history.tool_use.answers.stops))
        spec = parameters.bound_answer(spec, ceilings)
        bounds = (
            self.ledger.bounds.reasoning_bound(self.owner.user, spec.priority),
            ceilings.reasoning_bound(spec.priority),
        )
        ceiling = min(filter(None, bounds), key=lambda bound: bound[1], default=None)
        spec = parameters.bound_reasoning(
            spec, history.tool_use, opened=history.opened, ceiling=ceiling
        )
        spec = parameters.constrain_calls(spec, history.tool_use, opened=history.opened)
        if not call.scores_prompt:
            spec = msgspec.structs.replace(spec, prompt_logprobs=None)
        check_prompt_logprobs(spec)
        return msgspec.structs.replace(
            spec,
            no_cache=self._ignores_cache(),
            adapters=chosen_keys(client.adapters, parameters.get("lora")),
        )

    def _ignores_cache(self) -> bool:
        """Return whether the turn must compute its whole prompt."""
        retention_ms = self.settings.parameters.get("retention-ms")
        if not self.settings.parameters.get("cache-prompt"):
            return True
        if retention_ms < 0 or self.turns_begun == 0:
            return False
        rested = self.rested_at
        return rested is None or self.ledger.seconds() > rested + retention_ms / 1000

    async def _write_beginning(self) -> None:
        """Wait until a turn's beginning is in the journal, before the turn sends anything. After a
        kill, the turn could not be repeated without it.
        """
        try:
            await self.wait_recorded()
            self.recording.send_beginning()
        except BaseException:
            self.conversation.last.reader_left = True
            self.end_turn(Cancelled("the request was cancelled"))
            raise

    def _submit(self, turn: Turn) -> None:
        """Queue a turn, or set it aside if the session has lost its place since the call began."""
        request_place = self.request_place
        if request_place is None:
            turn.submit()
        else:
            turn.keep_aside(request_place)

    def set_aside(self, request_place: Callable[[], None]) -> None:
        """Take the turn from the engine until the session has a place again. *request_place*
        requests one once the turn is read.
        """
        turn = self.turn
        assert turn is not None, "the caller has checked that there is one"
        if self.state is SessionState.RUNNING:
            self.move_state(SessionCall.PARK)
        turn.set_aside(self.ledger.new_task_id(), request_place)

    def _engine_event(self, call: SessionCall) -> None:
        """Handle an event of the engine; meanwhile, the client may have ended the turn."""
        ticket = self.ticket
        if self.active:
            self.move_state(call)
        if self.active:
            return
        self.used_at = self.rested_at = self.ledger.seconds()
        turn, last = self.turn, self.conversation.last
        if turn is not None and self.session_id is not None and not last.reader_left:
            last.end = self._turn_end(turn)
        self.recording.turn_ended(last.end)
        self._restore_if_refused()
        self.count_kept_bytes()
        if turn is None:
            return
        if ticket is not None and turn.stats and not turn.resumed:
            self.ledger.charge_turn(ticket, turn.stats)
            if turn.generates:
                self.ledger.learn_from_turn(ticket, turn.stats)
        for listener in self.ledger.turn_listeners:
            listener.turn_ended(self.model, turn)

    async def pull_token(self, call: TurnOptions) -> bytes:
        """Generate the next token of a pull turn and return its text.

        :raises EndOfSequence: the turn has ended; the next call starts a turn on the same prompt.
        :raises SessionBusy: a turn of another kind is under way.
        """
        turn = self.turn
        if turn is None or not self._continues(turn):
            turn = await self.start_turn(msgspec.structs.replace(call, pull=True))
        try:
            piece = await turn.next_piece()
        except Exception:
            last = self.conversation.last
            last.ending_read, last.piece = True, turn.end_piece
            await self.wait_recorded()
            raise
        self.conversation.last.piece = piece
        return piece

    def _continues(self, turn: Turn) -> bool:
        if self.active:
            if not turn.spec.pull:
                step(self.state, SessionCall.COMPUTE)  # raises: a stream is under way
            return True
        ended_unread = turn.spec.pull and not self.conversation.last.ending_read
        return ended_unread and self.state in (SessionState.DONE, SessionState.FAILED)

    async def finish_turn(self, turn: Turn) -> None:
        """Wait for the end of *turn*; if the caller is cancelled, cancel the turn.

        :raises InferdError: it failed.
        """
        try:
            await turn.ended.wait()
        except BaseException:
            if turn is self.turn:
                self.conversation.last.reader_left = self.active
                self.end_turn(Cancelled("the request was cancelled"))
            raise
        await self.wait_recorded()
        if turn.error is not None:
            raise turn.error

    def cancel_turn(self, error: InferdError | None = None) -> bool:
        """Cancel the turn before its next step; return whether there was one."""
        self.move_state(SessionCall.CANCEL)
        active = self.active
        self.end_turn(error or Cancelled("the turn was cancelled"))
        return active

    def clear_output(self) -> None:
        """End the turn and delete its output; the history keeps the input and the output read."""
        self.move_state(SessionCall.FINI_SINGLE)
        self.end_turn(Cancelled("the turn was ended by fini_single"))
        last = self.conversation.last
        last.piece, last.output_cleared, last.failure = b"", True, None
        self.tensors.outputs = []

    def end_turn(self, error: InferdError) -> None:
        """End the turn at once and cancel it in the engine, whose later reports are ignored."""
        turn = self.turn
        if turn is not None and not turn.ended.is_set():
            turn.cancel()
            turn.report(m.Failed(turn.spec.id, error.to_wire()))

    def resumable_piece(self) -> TurnPiece | None:
        """Return the whole output of the last turn, with its end if it was not interrupted. Return
        None if there is no turn that can be resumed, or the positions of its shifts are unknown.
        """
        last, shifts = self.conversation.last, tuple(self.recording.shifts)
        turn, end = last.turn, last.end
        if turn is None or not turn.generates or len(shifts) != len(turn.shifts):
            return None
        return TurnPiece(
            tokens=m.pack_tokens(turn.tokens),
            text=bytes(turn.text),
            surprisals=m.pack_floats(turn.surprisals),
            ending_left=turn.ending_left,
            shifts=shifts,
            begin=last.begin,
            end=None if end is None else end.reason,
            metadata=self._interrupted_metadata(turn) if end is None else end.metadata,
            error=None if end is None else end.error,
        )

    # Output.

    def read_output(self, index: int) -> bytes:
        """Return the tensor of this index that was computed of inputs, if there is one; else output
        0 (the text so far) or 1 (metadata JSON).

        :raises NotFound: there is no such output.
        """
        step(self.state, SessionCall.GET_OUTPUT)
        if 0 <= index < len(self.tensors.outputs):
            return self.tensors.outputs[index].data
        if index == 0:
            turn = self._visible_turn()
            if turn is not None and turn.embedding is not None:
                return embedding_json(turn.embedding)
            return b"" if turn is None else bytes(turn.text) + turn.end_piece
        if index == 1:
            return msgspec.json.encode(self.metadata())
        raise NotFound(f"there is no output {index}", hint="0 is the text, 1 the metadata")

    def read_single_output(self, index: int) -> bytes:
        """Return the text of the last token, or metadata as `read_output` does."""
        step(self.state, SessionCall.GET_OUTPUT)
        return self.conversation.last.piece if index == 0 else self.read_output(index)

    def _visible_turn(self) -> Turn | None:
        last = self.conversation.last
        return None if last.output_cleared else last.turn

    def metadata(self, turn: Turn | None = None, *, logprobs: bool = True) -> Metadata:
        return describe_turn(
            self.conversation,
            self.settings,
            turn or self._visible_turn(),
            model=self.model.name,
            session_id=self.session_id,
            durable=self.recording.durable,
            logprobs=logprobs,
        )

    def note_failure(self, error: InferdError) -> None:
        """Keep the error of a call for a turn, until the next input or turn."""
        if not self.active:
            self.conversation.last.failure = error.to_wire()
            self.count_kept_bytes()

    def _turn_end(self, turn: Turn) -> TurnEnd:
        """Return the end of *turn*, which has ended."""
        metadata = self.metadata(turn, logprobs=False)  # they may be megabytes
        assert metadata.stop_reason is not None, "the turn has ended"
        error = None if turn.error is None else turn.error.to_wire()
        return TurnEnd(metadata.stop_reason, encode(metadata), error)

    def _interrupted_metadata(self, turn: Turn) -> bytes:
        """Return the packed metadata of *turn*, whose reader has disconnected."""
        metadata = self.metadata(turn, logprobs=False)
        metadata.error, metadata.stop_reason, metadata.stop_detail = UNSET, DETACHED, ""
        return encode(metadata)

    def ended_turn(self) -> Replay | None:
        """Return the last turn, if its end can be read again after the session was attached."""
        resumable = self.conversation.history_state.resumable
        return resumable if resumable is not None and resumable.ended else None

    def new_splitter(self, options: Mapping[str, Any], turn: Turn) -> AnswerSplitter:
        """Return the splitter of the answer of *turn*, which has begun with *options*."""
        history = self.conversation.history_state.now
        return new_splitter(history, turn.seed, self.settings.parameters, options)

    def resume_splitter(self, received: AnswerParts, raw: bytes) -> tuple[bytes, AnswerSplitter]:
        """Return the resumable turn's text that its reader has, and the splitter of the rest."""
        state = self.conversation.history_state
        return resume_splitter(state, self.settings.parameters, received, raw)

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

    def begin_from(
        self, name: str, facts: SessionFacts, history: History, shared_kv: SharedKv | None
    ) -> None:
        """Begin a new session with the history and the facts of the state *name*. *shared_kv* is
        the state's KV state, if another user has that.

        :raises InvalidArgument: it has another model, or its model has another vocabulary.
        :raises QuotaExceeded: its owner's open sessions would become too large.
        """
        if facts.model != self.model.name:
            raise InvalidArgument(
                f"state {name!r} has model {facts.model!r}, not {self.model.name!r}",
                hint="open the session with the state's model",
            )
        vocabulary = HistoryVocabulary(facts.fingerprint, facts.vocabulary)
        if history.prompt and not history.messages:
            vocabulary.check_model(self.model, f"state {name!r}", "save another state")
        self.check_growth(SESSION_BYTES + history.kept_bytes)
        self.settings.parameters.options = dict(facts.options)
        self.settings.shared_kv = shared_kv
        self.conversation.vocabulary = vocabulary
        if history.prompt:
            self.accept_history(SessionCall.SET_INPUT, history)
        else:
            self.conversation.history_state.replace_history(history)

    def note_recent_chat(self) -> None:
        """Note the chat of an ended session without an id, which a later request may continue."""
        turn, conversation = self.turn, self.conversation
        history = conversation.history_state.now
        if self.recent is None or turn is None or not turn.ended.is_set() or turn.error is not None:
            return
        whole = self._sent_whole and len(history.messages) == len(self._sent) > 0
        whole = whole and not (history.dropped_bytes or conversation.shifted or history.continued)
        if whole and turn.generates and not turn.stopped_by_text:
            piece = TurnPiece(
                tokens=m.pack_tokens(turn.tokens),
                text=bytes(turn.text),
                begin=TurnBegin(seed=turn.seed),
            )
            fingerprint = conversation.vocabulary.fingerprint
            self.recent.add(self.owner, fingerprint, self._sent, history, piece)

    def delete_recent_chats(self) -> None:
        """Delete the recent chats that this session has continued; it becomes none itself."""
        if self.recent is not None:
            self.recent.delete(self.owner, self._sent)
            self.recent = None

    def end(self, call: SessionCall, why: str) -> None:
        """End by *call* (close, unload, expire): cancel the turn, whose reader gets *why*."""
        self.move_state(call)
        self.end_turn(Cancelled(why))

    def unload(self) -> None:
        """Separate the session from its model; its output can still be read."""
        self.end(SessionCall.UNLOAD, "the graph was unloaded")

    def detach(self) -> None:
        """Become dormant: cancel the turn, keep its tokens, pack the history for `attach`. If the
        session persists, its KV state is written to disk.
        """
        self.conversation.last.reader_left |= self.active
        self.settings.opening = self.opening
        self.end_turn(Cancelled("the session was detached"))
        piece = self.resumable_piece()
        history_state = self.conversation.history_state
        history_state.pack(self.turn, piece)
        self.accept_history(SessionCall.DETACH, self.conversation.current_history())
        client, prompt = self.model.loaded, self.conversation.prompt
        if client is not None and self.settings.persist and prompt:
            client.save_session(self.owner, self.name, self.settings.adapters, prompt)
        history_state.make_dormant()

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


async def _checked_tokens(
    client: WorkerClient, tokens: list[int], *, append: bool
) -> tuple[list[int], bool, Mapping[str, str]]:
    """Check token ids of a prompt. Return them, whether they are appended, and the parameters
    without effect on its turn. Each prompt of an encoder-decoder replaces the history, and
    ends with the token with which the decoder begins.

    :raises InvalidArgument: there are none, or one is not in the model's vocabulary.
    """
    size = client.info.vocab_size
    bad = next((token for token in tokens if not 0 <= token < size), None)
    if bad is not None or not tokens:
        raise InvalidArgument(
            "prompt_tokens: there are none"
            if bad is None
            else f"prompt_tokens: token {bad} is not in the model's vocabulary of {size}",
            hint="`tokenize` returns the tokens of a text",
            data={"vocab_size": size},
        )
    start = client.info.decoder_start_token
    if start is not None:
        tokens, append = as_prompt(tokens, start), False
    return tokens, append, client.info.unused | NO_TEMPLATE


def _notes_on(messages: Sequence[Mapping[str, Any]], notes: Mapping[str, str]) -> dict[str, str]:
    """Return the *notes* on the chat template that concern these messages, in one: those named by a
    role or a key of a message, and those on all chats.
    """
    present = {str(m["role"]) for m in messages} | {key for m in messages for key in m}
    found = [text for name, text in notes.items() if name == CHAT_TEMPLATE or name in present]
    return {CHAT_TEMPLATE: "; ".join(found)} if found else {}

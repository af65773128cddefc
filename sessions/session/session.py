"""A session: one conversation with one model, its history, its parameters, its turn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, TypeVar

import anyio
import msgspec

from ...backends import Rendering
from ...backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    NotFound,
    UnsupportedOperation,
    WorkerCrashed,
)
from ...backends.params import Options, read_options
from ...scheduler import messages as m
from ...scheduler.priority import PRIORITIES, Priority
from ..admission.forecast import Ticket
from ..admission.ledger import Ledger
from ..history.history import History
from ..history.reasoning import ReasoningSplitter, Said, go_on
from ..history.retokenize import Vocabulary
from ..history.state import Past
from ..journal.entries import Begin, Facts, Piece, Replay, Stored, decode_past
from ..journal.journal import NoRecording
from ..table import ACTIVE, Call, State, step
from ..turn import PositionSink, TokensSink, Turn
from ..turns.adapter_choice import told
from ..turns.resumption import resumed
from ..turns.start import begin_of, task_of, ticket_of
from ..turns.turn_options import NO_OPTIONS, Parameters, TurnOptions
from ..worker_client import ModelSource, Port, ask_again
from .embedding_output import embedding_json
from .outputs import metadata

__all__ = ("Session",)

T = TypeVar("T")


class Session:
    """Owned by the daemon's event loop. `prompt` is the history up to the turn, in token ids.

    Input either replaces the history or, with the option `append`, adds to it. `persist` says that
    a session with an id may be written to disk: its history by `recording`, its KV state by the
    worker.
    """

    def __init__(
        self,
        handle: int,
        owner: int,
        model: ModelSource,
        ledger: Ledger,
        defaults: dict[str, Any],
        session_id: str | None = None,
    ):
        self.handle = handle
        self.owner = owner
        self.model = model
        self.session_id = session_id
        self.state = State.EMPTY
        self.parameters = Parameters(defaults)
        self.priority = Priority.NORMAL
        self.persist = True
        self.turn: Turn | None = None
        self.adapters: tuple[str, ...] = ()
        """The keys of the last turn's: its KV state is found by them."""
        self.lora: dict[str, float] = {}
        """The same for people: scales by names."""
        self.piece = b""
        """What the last compute_single drew."""
        self.used_at = 0.0
        self.rested_at: float | None = None
        """When its last turn ended, if this daemon knows."""
        self.turns = 0
        self.turn_at = 0.0
        self.recording = NoRecording()
        self.past = Past()
        self.vocabulary = Vocabulary()
        self._how = Begin()
        self._left = False
        """The turn was ended because its reader went away."""
        self._ledger = ledger
        self._ticket: Ticket | None = None
        self._lock = anyio.Lock()
        self._cleared = False
        """fini_single was called: the output is gone, the history is not."""
        self._read_ending = False

    def __repr__(self) -> str:
        return f"<Session {self.handle:#x} [{self.state} | {len(self.prompt)} tokens]>"

    @classmethod
    def restored(cls, stored: Stored, model: ModelSource, ledger: Ledger) -> Session:
        """Return the dormant session that lies in the journal."""
        facts = stored.facts
        new = cls(0, stored.owner, model, ledger, facts.defaults, stored.session_id)
        new.state, new.past = State.DORMANT, Past.stored(stored)
        new.parameters.options = dict(facts.options)
        begun = [piece.begin.turns for piece in stored.pieces if piece.begin is not None]
        new.priority, new.turns = PRIORITIES[facts.priority], max(facts.turns, *begun, 0)
        new.vocabulary = Vocabulary(facts.fingerprint, facts.vocabulary)
        return new

    @property
    def facts(self) -> Facts:
        """What the journal keeps beside the past."""
        asleep = self.past.asleep_tokens
        return Facts(
            model=self.model.name,
            fingerprint=self.vocabulary.fingerprint,
            vocabulary=self.vocabulary.hash,
            options=self.parameters.options,
            defaults=self.parameters.defaults,
            priority=self.priority.label,
            turns=self.turns,
            tokens=len(self.prompt) if asleep is None else asleep,
        )

    @property
    def packed(self) -> bytes:
        """The past, as the journal keeps it."""
        return self.past.packed

    @property
    def interrupted(self) -> Replay | None:
        """The turn that the history ends with, if that has no end."""
        return self.past.interrupted

    async def settled(self) -> None:
        """Wait until what was answered is in the journal, or cannot be: the metadata say which."""
        await self.recording.settled()

    @property
    def prompt(self) -> list[int]:
        """The history up to the turn, in token ids."""
        return self.past.now.prompt

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat up to the turn; empty for raw text."""
        return self.past.now.messages

    @property
    def name(self) -> str:
        """What the engine calls it: unique among its owner's sessions, and never given again."""
        return f"#{self.handle}" if self.session_id is None else f"id:{self.session_id}"

    @property
    def leaves_state(self) -> bool:
        """Tell whether there may be KV state that serves this session alone: those of others with
        the same tokens are shared, and no file is kept of a session without an id.
        """
        return self.session_id is not None or self.past.now.after(self.turn).shifted

    @property
    def active(self) -> bool:
        """Tell whether a turn is under way."""
        return self.state in ACTIVE

    def move(self, call: Call) -> None:
        """Do one step of the state table, or raise the error that refuses it."""
        self.state = step(self.state, call)
        if self._ticket is not None:
            self._ledger.move_ticket(self._ticket, self.state)
            self._ticket = self._ticket if self.active else None

    def _event(self, call: Call) -> None:
        """Take an event of the engine; it may come after the client has moved on."""
        ticket = self._ticket
        if self.active:
            self.move(call)
        if not self.active:
            self.used_at = self.rested_at = self._ledger.seconds()
            self.recording.ended()
            turn = self.turn
            if ticket is not None and turn is not None and turn.stats and not turn.resumed:
                self._ledger.charge_turn(ticket, turn.stats)
                if turn.says:
                    self._ledger.learn_from_turn(ticket, turn.stats)
            if turn is not None:
                for listener in self._ledger.turn_listeners:
                    listener.turn_ended(self.model, turn)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Have the session alone, and while turns of its model are not held back."""
        while True:
            await self.model.released()
            async with self._lock:
                if not self.model.held:
                    yield
                    return

    # Input.

    async def set_input(self, text: bytes) -> int:
        """Make *text* the prompt, or add it to the history; return the prompt's tokens.

        :raises SessionBusy: a turn is under way.
        """
        async with self._alone():
            step(self.state, Call.SET_INPUT)
            append = bool(self.parameters.standing("append")) and bool(self.prompt)
            tokens = await self._ask(
                lambda p: p.tokenize(text, special=True, bos=not append, turn=True),
                anew=not append,
            )
            past = self.past.now.after(self.turn)
            past.extend(tokens) if append else past.replace(tokens)
            self._take(Call.SET_INPUT, past)
        await self.settled()
        return len(tokens)

    def set_options(self, values: dict[str, Any]) -> None:
        """Let parameters hold for this session from the next token on.

        :raises InvalidArgument: a key is unknown, or a value out of its range.
        """
        self.apply(read_options(values, strict=True))

    def apply(self, options: Options) -> None:
        """Let parameters that were read hold from the next token on; note what does not."""
        self.parameters.apply(options)
        if self.turn is not None and self.active:
            self.turn.adjust(self.parameters.fill(self.turn.spec))
        self.recording.facts_changed()

    async def add_text(self, text: bytes) -> None:
        """Add *text* to the history as it stands."""
        async with self._alone():
            step(self.state, Call.SET_INPUT)
            bos = not self.prompt
            tokens = await self._ask(lambda p: p.tokenize(text, special=True, bos=bos, turn=True))
            past = self.past.now.after(self.turn)
            past.extend(tokens)
            self._take(Call.SET_INPUT, past)
        await self.settled()

    async def add_messages(
        self, messages: Sequence[dict[str, Any]], options: Mapping[str, Any] = NO_OPTIONS
    ) -> None:
        """Add chat messages to the history, by the model's template, which is told what holds in a
        turn with *options*; after raw text, begin anew.
        """
        rendering = self.parameters.rendering(options)
        async with self._alone():
            step(self.state, Call.SET_INPUT)
            past = await self._ask(lambda p: self._chatted(p, messages, rendering))
            self._take(Call.SET_INPUT, past)
        await self.settled()

    async def _chatted(
        self, port: Port, messages: Sequence[dict[str, Any]], rendering: Rendering
    ) -> History:
        past = self.past.now.after(self.turn)
        await past.chat(port, messages, rendering)
        return past

    def reset(self, system: str | None = None) -> None:
        """Forget the history; *system* is then the first message of the next one."""
        self._take(Call.RESET, History(system))

    @property
    def size(self) -> int:
        """Tokens of the history, of a dormant session, too."""
        asleep = self.past.asleep_tokens
        return len(self.history()) if asleep is None else asleep

    def history(self) -> list[int]:
        """Return the prompt and what the reader has been told since, in token ids."""
        return self.prompt if self.turn is None else self.turn.history()

    @property
    def turns_back(self) -> int:
        """How many turns `rewind` can go back."""
        return len(self.past.now.marks)

    def _take(self, call: Call, past: History) -> None:
        self.move(call)
        self.past.set(past)
        self.turn, self.piece, self._left = None, b"", False
        self.recording.past_changed()

    @contextlib.contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Take input back that was given inside, if no turn begins on it there: who tries again
        gives it again.
        """
        history, past = self.past.now, copy(self.past)
        vocabulary = copy(self.vocabulary)
        before = (self.state, self.turn, self.piece, self._left)
        try:
            yield
        except BaseException:
            taken = self.past.now is not history and self.turn is None
            if taken and self.state is State.READY:
                self.past, self.vocabulary = past, self.vocabulary.undone(vocabulary)
                self.state, self.turn, self.piece, self._left = before
                self.recording.past_changed()
            raise

    # Branches.

    async def rewind(self, turns: int | None, tokens: int | None) -> None:
        """Go back by *turns*, or to the first *tokens* tokens; just one of both is given.

        :raises SessionBusy: a turn is under way.
        :raises InvalidArgument: there is not so much to go back.
        """
        async with self._alone():
            step(self.state, Call.REWIND)
            if self.vocabulary.carried is not None:
                await self._port()  # the text is that of the whole
            past = self.past.now.after(self.turn)
            if turns is not None:
                past.rewind_turns(turns)
            else:
                past.rewind_tokens(tokens or 0)
            self._take(Call.REWIND if past.prompt else Call.RESET, past)
        await self.settled()

    def branch(self, handle: int, session_id: str | None) -> Session:
        """Return a new session that goes on from here: history, parameters and priority copied.

        :raises SessionBusy: a turn is under way.
        """
        step(self.state, Call.FORK)
        new = Session(handle, self.owner, self.model, self._ledger, {}, session_id)
        new.parameters = self.parameters.copy()
        new.priority, new.persist = self.priority, self.persist
        new.adapters = self.adapters
        new.vocabulary = self.vocabulary.branch()
        if self.state is not State.EMPTY:
            new._take(Call.SET_INPUT, self.past.now.after(self.turn))
        else:
            new.past.set(self.past.now.copy())
        return new

    async def tokens_kept(self) -> int:
        """Return how many of the history's tokens need not be computed again, as of now."""
        port = self.model.loaded
        if port is None:
            return 0
        try:
            return await port.lookup(self.owner, self.name, self.adapters, self.history())
        except WorkerCrashed:
            return 0

    # Turns.

    async def _ask(self, question: Callable[[Port], Awaitable[T]], *, anew: bool = False) -> T:
        """Return the worker's answer, of another worker where one dies meanwhile.

        :raises WorkerCrashed: the question ended the worker, or too many workers have died.
        """
        return await ask_again(lambda: self._port(anew=anew), question)

    async def _port(self, *, anew: bool = False) -> Port:
        """Return the line to the worker. A history in the tokens of a model that had the name
        before a swap is said again in those of the present one, unless the session begins *anew*.
        """
        port = await self.model.ready()
        at_rest = not self.active and bool(self.history())
        if self.vocabulary.is_another(port.info) and at_rest and not anew:
            await self._retell(port)
        self.vocabulary.take(port.info)
        return port

    async def carry(self, *, also_text: bool) -> None:
        """Wait until whatever had the line to the model before a swap has done with it. With
        *also_text* the text is taken along of a history in its tokens, as it stands.

        :raises InferdError: nobody can tell the text.
        """
        async with self._lock:
            if also_text and self.history():
                await self.vocabulary.carry(self.model, self.past.now.after(self.turn))

    async def _retell(self, port: Port) -> None:
        past = self.past.now.after(self.turn)
        await self.vocabulary.retell(self.model, port, past)
        self.past.set(past)
        self.turn = None
        self.recording.past_changed()

    async def start(
        self,
        call: TurnOptions,
        on_tokens: TokensSink | None = None,
        on_position: PositionSink | None = None,
    ) -> Turn:
        """Queue a turn on the prompt as it stands.

        :raises Busy: too many tasks wait; `retry_after_s` says when to come back.
        """
        async with self._alone():
            port = await self._startable(embeds=call.embeds)
            turn = self._begin(port, call, on_tokens, on_position)
            await self._write_beginning()
            if not turn.ended.is_set():
                turn.start()
            return turn

    def splitter(self, options: Mapping[str, Any]) -> ReasoningSplitter:
        """Return what splits the answer of a turn with *options* on the history up to it."""
        on = self.parameters.in_turn("reasoning-format", options) != "none"
        return ReasoningSplitter(on=on, opened=self.past.now.opens_reasoning)

    def splitter_after(self, has: Said) -> tuple[bytes, ReasoningSplitter]:
        """Return of the turn that was interrupted: the text whose parts its reader *has*, and what
        splits the rest.

        :raises InvalidArgument: he has something else.
        """
        before = self.interrupted
        if before is None:
            return has.text, ReasoningSplitter(on=False)
        on = self.parameters.in_turn("reasoning-format", before.begin.options) != "none"
        opened = self.past.before.opens_reasoning
        return go_on(before.text, has, on=on, opened=opened)

    async def resume(
        self,
        call: TurnOptions,
        tokens: Sequence[int],
        text: bytes,
        on_tokens: TokensSink | None = None,
        on_position: PositionSink | None = None,
    ) -> Turn:
        """Go on with the turn that was interrupted, with its own options and seed. Its reader has
        these *tokens* and this *text* of it; he is told first what he has not.

        :raises InvalidArgument: there is none, or the reader has something else.
        """
        async with self._alone():
            port = await self._startable()
            size = port.info.vocab_size
            whole, own = resumed(self.interrupted, call, tokens, text, size)
            past, self.past.now = self.past.now, self.past.before
            try:
                turn = self._begin(port, own, on_tokens, on_position, whole)
            except BaseException:
                self.past.now = past
                raise
            await self._write_beginning()
            if turn.ended.is_set():
                return turn
            turn.resume()
            told, said = whole.tokens[len(tokens) :], whole.text[len(text) :]
            if on_tokens is not None and (told or said):
                on_tokens(m.Tokens(turn.spec.id, told, said))
            return turn

    async def _write_beginning(self) -> None:
        """Have a turn's beginning in the journal before it tells anything: without it nobody could
        say it again after a kill.
        """
        try:
            await self.settled()
        except BaseException:
            self._left = True
            self._end_turn(Cancelled("the request was cancelled"))
            raise

    async def _startable(self, *, embeds: bool = False) -> Port:
        """Return the line to the worker, if a turn may begin; with *embeds* with room for
        embeddings, if they are asked for.
        """
        step(self.state, Call.COMPUTE)  # one turn at a time: a pull turn is gone on with, too
        port = await self._port()
        if embeds and self.parameters.standing("embedding"):
            await port.make_room_to_embed()
        step(self.state, Call.COMPUTE)  # it may have been closed or emptied meanwhile
        return port

    def _begin(
        self,
        port: Port,
        call: TurnOptions,
        on_tokens: TokensSink | None,
        on_position: PositionSink | None,
        before: Replay | None = None,
    ) -> Turn:
        """Return a new turn on the past as it stands, of which the worker does not know yet; it may
        go on where another one was interrupted, *before*.

        :raises Busy: too many tasks wait.
        """
        spec = task_of(self, port, call, self._ledger.new_task_id(), self._ledger.seconds())
        self.adapters, self.lora = spec.adapters, told(port.adapters, spec.adapters)
        if spec.embed is not None and not call.embeds:
            raise UnsupportedOperation(
                "the context makes embeddings, and this call is for answers",
                hint="use compute and get_output, or set the parameter embedding to false",
            )
        ticket = ticket_of(self, spec, port.info.slots, goes_on=call.goes_on)
        self._ledger.admit_turn(ticket)
        self._ticket = ticket
        self.move(Call.COMPUTE_SINGLE if call.pull else Call.COMPUTE)
        sink = self.recording.watch(on_tokens)
        self.turn = turn = Turn(port, spec, self._event, sink, on_position, self.model.compare)
        self._ticket.output = turn.tokens
        self.turns += 1
        self.turn_at = self._ledger.seconds()
        self.piece, self._read_ending, self._cleared = b"", False, False
        if self.interrupted is not None:
            self.past.interrupted = None
            self.recording.past_changed()  # it has the turn that was interrupted
        if before is not None:
            turn.take_over(before)
            ticket.before = len(turn.tokens)
        self._left, self._how = False, begin_of(self, call, spec)
        if turn.says:
            shifts = () if before is None else before.placed_shifts
            self.recording.begin(turn, self._how, shifts)
        for listener in self._ledger.turn_listeners:
            listener.turn_began(self.model, turn, chat=bool(self.messages))
        return turn

    async def compute_single(self, call: TurnOptions) -> bytes:
        """Draw the next token of a pull turn and return its text.

        :raises EndOfSequence: the turn has ended; the next call starts the prompt anew.
        :raises SessionBusy: a turn of another kind is under way.
        """
        turn = self.turn
        if turn is None or not self._continues(turn):
            turn = await self.start(msgspec.structs.replace(call, pull=True))
        try:
            self.piece = await turn.next_piece()
        except Exception:
            self._read_ending = True
            self.piece = turn.end_piece
            await self.settled()
            raise
        return self.piece

    def _continues(self, turn: Turn) -> bool:
        if self.active:
            if not turn.spec.pull:
                step(self.state, Call.COMPUTE)  # refuses: a stream is under way
            return True
        ended_unread = turn.spec.pull and not self._read_ending
        return ended_unread and self.state in (State.DONE, State.FAILED)

    async def finish(self, turn: Turn) -> None:
        """Wait for the end of *turn*; if the caller is cancelled, so is the turn.

        :raises InferdError: it failed.
        """
        try:
            await turn.ended.wait()
        except BaseException:
            if turn is self.turn:
                self._left = self.active
                self._end_turn(Cancelled("the request was cancelled"))
            raise
        await self.settled()
        if turn.error is not None:
            raise turn.error

    def cancel(self, error: InferdError | None = None) -> bool:
        """Stop the turn before its next step; tell whether there was one."""
        self.move(Call.CANCEL)
        active = self.active
        self._end_turn(error or Cancelled("the turn was cancelled"))
        return active

    def fini_single(self) -> None:
        """End the turn and forget its output; the history keeps what was read, the input stays."""
        self.move(Call.FINI_SINGLE)
        self._end_turn(Cancelled("the turn was ended by fini_single"))
        self.piece, self._cleared = b"", True

    def stop(self, call: Call, why: str) -> None:
        """Leave for good by *call* (close, unload, expire): the turn ends, its readers are told."""
        self.move(call)
        self._end_turn(Cancelled(why))

    def sleep(self) -> None:
        """Go dormant: the turn ends, its tokens stand, the history waits for `adopt`.

        What is known of them is written to disk, where the session may be.
        """
        unfinished = self.active or self._left
        self._end_turn(Cancelled("the session was detached"))
        self.past.pack(self.turn, self._told() if unfinished else None)
        self._take(Call.DETACH, self.past.now.after(self.turn))
        port = self.model.loaded
        if port is not None and self.persist and self.prompt:
            port.keep(self.owner, self.name, self.adapters, self.prompt)
        self.past.sleep()

    def _told(self) -> Piece | None:
        """Return all that the turn has told; None if nobody knows when its shifts were."""
        turn, shifts = self.turn, tuple(self.recording.shifts)
        if turn is None or len(shifts) != len(turn.shifts):
            return None
        tokens, text = m.pack_tokens(turn.tokens), bytes(turn.text)
        surprises = m.pack_floats(turn.surprises)
        return Piece(tokens=tokens, text=text, surprises=surprises, shifts=shifts, begin=self._how)

    def adopt(self, handle: int, model: ModelSource) -> None:
        """Come back from dormancy under a new handle, on a new lease of the same model.

        :raises InvalidArgument: the session is of another model, or of one with other tokens.
        """
        if model.name != self.model.name:
            raise InvalidArgument(
                f"session {self.session_id!r} is of model {self.model.name!r}, not {model.name!r}",
                hint="attach it with its own model, or take another session id",
            )
        port = model.loaded
        entry = decode_past(self.packed)
        other = port is not None and self.vocabulary.is_another(port.info)
        told = bool(entry.messages) or self.vocabulary.carried is not None
        if other and port is not None and entry.tokens and not told:
            raise InvalidArgument(
                f"session {self.session_id!r} has other tokens than model {model.name!r} has now",
                hint="its file was exchanged: take another session id, or forget this one",
                data={
                    "fingerprint": self.vocabulary.fingerprint,
                    "fingerprint_now": port.info.fingerprint,
                },
            )
        self.move(Call.ATTACH)
        self.handle, self.model = handle, model
        self.past.wake()
        self.recording.past_changed()

    def _end_turn(self, error: InferdError) -> None:
        """End the turn here and now; the engine is told, what it still says comes too late."""
        turn = self.turn
        if turn is not None and not turn.ended.is_set():
            turn.cancel()
            turn.report(m.Failed(turn.spec.id, error.to_wire()))

    # Output.

    def output(self, index: int) -> bytes:
        """Return output 0 (the text so far) or 1 (metadata JSON).

        :raises NotFound: there is no such output.
        """
        step(self.state, Call.GET_OUTPUT)
        if index == 0:
            turn = self._shown()
            if turn is not None and turn.embedding is not None:
                return embedding_json(turn.embedding)
            return b"" if turn is None else bytes(turn.text) + turn.end_piece
        if index == 1:
            return msgspec.json.encode(self.metadata())
        raise NotFound(f"there is no output {index}", hint="0 is the text, 1 the metadata")

    def output_single(self, index: int) -> bytes:
        """Return the text of the last token, or metadata as `output` does."""
        step(self.state, Call.GET_OUTPUT)
        return self.piece if index == 0 else self.output(index)

    def _shown(self) -> Turn | None:
        return None if self._cleared else self.turn

    def metadata(self) -> dict[str, Any]:
        """Return what explains the last turn."""
        return metadata(self, self._shown())

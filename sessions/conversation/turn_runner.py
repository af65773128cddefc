"""The start, resumption, token-by-token pull and end of a session's turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ...backends.errors import Cancelled, InferdError, UnsupportedOperation
from ...scheduler import messages as m
from ..entries import Replay, TurnPiece
from ..history.overflow import ContextLimit
from ..memory import memory_bytes
from ..table import SessionCall, SessionState, step
from ..turn.options import TurnOptions
from ..turn.start import begin_of, resumed, scales_by_name, task_of, ticket_of
from ..turn.turn import ProgressSink, TokensSink, Turn
from ..worker_client import WorkerClient
from .core import LastTurn, SessionCore
from .model_link import ModelLink
from .outputs import SessionOutputs


class TurnRunner:
    """The turns of a session, one at a time. Owned by its session."""

    def __init__(self, core: SessionCore, link: ModelLink, outputs: SessionOutputs):
        self._core, self._link, self._outputs = core, link, outputs

    async def start_turn(
        self,
        call: TurnOptions,
        on_tokens: TokensSink | None = None,
        on_progress: ProgressSink | None = None,
    ) -> Turn:
        """Queue a turn on the present prompt.

        :raises Busy: too many tasks wait; `retry_after_s` says when to retry.
        """
        async with self._link.exclusive():
            client = await self._ready_client(embeds=call.embeds)
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
        async with self._link.exclusive():
            client = await self._ready_client()
            history_state, size = self._core.conversation.history_state, client.info.vocab_size
            so_far, options = resumed(history_state.resumable, call, tokens, text, size)
            before = self._core.before_input()
            history_state.now = history_state.before
            try:
                turn = self._begin_turn(client, options, on_tokens, on_progress, so_far)
            except BaseException:
                history_state.now = before.conversation.history_state.now
                raise
            self._core.conversation.last.before = before
            await self._write_beginning()
            if turn.ended.is_set():
                return turn
            self._submit(turn)
            missed_tokens, missed_text = so_far.tokens[len(tokens) :], so_far.text[len(text) :]
            if on_tokens is not None and (missed_tokens or missed_text):
                on_tokens(m.Tokens(turn.spec.id, missed_tokens, missed_text))
            return turn

    def _submit(self, turn: Turn) -> None:
        """Queue a turn, or set it aside if the session has lost its place since the call began."""
        request_place = self._core.request_place
        if request_place is None:
            turn.submit()
        else:
            turn.keep_aside(request_place)

    def set_aside(self, request_place: Callable[[], None]) -> None:
        """Take the turn from the engine until the session has a place again. *request_place*
        requests one once the turn is read.
        """
        turn = self._core.turn
        assert turn is not None, "the caller has checked that there is one"
        if self._core.state is SessionState.RUNNING:
            self._core.move_state(SessionCall.PARK)
        turn.set_aside(self._core.ledger.new_task_id(), request_place)

    async def _write_beginning(self) -> None:
        """Wait until a turn's beginning is in the journal, before the turn sends anything. After a
        kill, the turn could not be repeated without it.
        """
        try:
            await self._core.wait_recorded()
            self._core.recording.send_beginning()
        except BaseException:
            self._core.conversation.last.reader_left = True
            self.end_turn(Cancelled("the request was cancelled"))
            raise

    async def _ready_client(self, *, embeds: bool = False) -> WorkerClient:
        """Return the worker client, if a turn may begin. With *embeds*, reserve memory for
        embeddings if the parameters request them.
        """
        core = self._core
        step(core.state, SessionCall.COMPUTE)  # refuses a second turn, even for a pull turn
        client = await self._link.client()
        if embeds and core.settings.parameters.standing("embedding"):
            await client.reserve_embedding_memory()
            client = await self._link.client()  # the model may have been loaded again for it
        step(core.state, SessionCall.COMPUTE)  # it may have been closed or reset meanwhile
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
        history_state = self._core.conversation.history_state
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
        conversation, parameters = self._core.conversation, self._core.settings.parameters
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
        core, ledger, conversation = self._core, self._core.ledger, self._core.conversation
        core.check_growth(memory_bytes(call.options, call.notes.ignored, call.notes.out_of_range))
        try:
            spec = task_of(core, client, call, ledger.new_task_id(), ledger.seconds())
        finally:
            core.count_kept_bytes()  # the session keeps the options, even of a refused turn
        if exceeded is not None and (reason := exceeded.kept_reason):
            core.settings.parameters.adjusted["n-keep"] = reason
        core.settings.adapters = spec.adapters
        core.settings.lora = scales_by_name(client.adapters, spec.adapters)
        if spec.embed is not None and not call.embeds:
            raise UnsupportedOperation(
                "the context makes embeddings; this call generates text",
                hint="use compute and get_output, or set the parameter embedding to false",
            )
        if conversation.last.overlong is not None:
            raise conversation.last.overlong.error(len(conversation.prompt), spec.ctx_size)
        core.check_growth(len(spec.tokens))
        ticket = ticket_of(core, spec, client.info.slots, quota_checked=call.quota_checked)
        ledger.admit_turn(ticket)
        core.ticket = ticket
        core.move_state(SessionCall.COMPUTE_SINGLE if call.pull else SessionCall.COMPUTE)
        sink, compare = core.recording.watch_tokens(on_tokens), core.model.compare
        turn = Turn(client, spec, self._engine_event, sink, on_progress, compare)
        ticket.output = turn.tokens
        core.turns_begun += resumes is None  # a resumed turn keeps its number
        core.turn_at = ledger.seconds()
        begin = begin_of(core, call, spec)
        conversation.last = LastTurn(turn, begin, before=conversation.last.before)
        core.count_kept_bytes()
        if conversation.history_state.resumable is not None or exceeded is not None:
            conversation.history_state.resumable = None
            core.recording.history_changed()  # it includes the previous turn, or was shortened
        if resumes is not None:
            turn.take_over(resumes)
            ticket.resumed_tokens = len(turn.tokens)
        if turn.generates:
            shifts = () if resumes is None else resumes.placed_shifts
            core.recording.turn_began(turn, conversation.last.begin, shifts)
        for listener in ledger.turn_listeners:
            listener.turn_began(core.model, turn, chat=bool(conversation.messages))
        return turn

    def _engine_event(self, call: SessionCall) -> None:
        """Handle an event of the engine; meanwhile, the client may have ended the turn."""
        core = self._core
        ticket = core.ticket
        if core.active:
            core.move_state(call)
        if core.active:
            return
        core.used_at = core.rested_at = core.ledger.seconds()
        turn, last = core.turn, core.conversation.last
        if turn is not None and core.session_id is not None and not last.reader_left:
            last.end = self._outputs.turn_end(turn)
        core.recording.turn_ended(last.end)
        core.restore_if_refused()
        core.count_kept_bytes()
        if turn is None:
            return
        if ticket is not None and turn.stats and not turn.resumed:
            core.ledger.charge_turn(ticket, turn.stats)
            if turn.generates:
                core.ledger.learn_from_turn(ticket, turn.stats)
        for listener in core.ledger.turn_listeners:
            listener.turn_ended(core.model, turn)

    async def pull_token(self, call: TurnOptions) -> bytes:
        """Generate the next token of a pull turn and return its text.

        :raises EndOfSequence: the turn has ended; the next call starts a turn on the same prompt.
        :raises SessionBusy: a turn of another kind is under way.
        """
        turn = self._core.turn
        if turn is None or not self._continues(turn):
            turn = await self.start_turn(msgspec.structs.replace(call, pull=True))
        try:
            piece = await turn.next_piece()
        except Exception:
            last = self._core.conversation.last
            last.ending_read, last.piece = True, turn.end_piece
            await self._core.wait_recorded()
            raise
        self._core.conversation.last.piece = piece
        return piece

    def _continues(self, turn: Turn) -> bool:
        if self._core.active:
            if not turn.spec.pull:
                step(self._core.state, SessionCall.COMPUTE)  # raises: a stream is under way
            return True
        ended_unread = turn.spec.pull and not self._core.conversation.last.ending_read
        return ended_unread and self._core.state in (SessionState.DONE, SessionState.FAILED)

    async def finish_turn(self, turn: Turn) -> None:
        """Wait for the end of *turn*; if the caller is cancelled, cancel the turn.

        :raises InferdError: it failed.
        """
        try:
            await turn.ended.wait()
        except BaseException:
            if turn is self._core.turn:
                self._core.conversation.last.reader_left = self._core.active
                self.end_turn(Cancelled("the request was cancelled"))
            raise
        await self._core.wait_recorded()
        if turn.error is not None:
            raise turn.error

    def cancel_turn(self, error: InferdError | None = None) -> bool:
        """Cancel the turn before its next step; return whether there was one."""
        self._core.move_state(SessionCall.CANCEL)
        active = self._core.active
        self.end_turn(error or Cancelled("the turn was cancelled"))
        return active

    def clear_output(self) -> None:
        """End the turn and delete its output; the history keeps the input and the output read."""
        self._core.move_state(SessionCall.FINI_SINGLE)
        self.end_turn(Cancelled("the turn was ended by fini_single"))
        last = self._core.conversation.last
        last.piece, last.output_cleared, last.failure = b"", True, None

    def end_turn(self, error: InferdError) -> None:
        """End the turn at once and cancel it in the engine, whose later reports are ignored."""
        turn = self._core.turn
        if turn is not None and not turn.ended.is_set():
            turn.cancel()
            turn.report(m.Failed(turn.spec.id, error.to_wire()))

    def resumable_piece(self) -> TurnPiece | None:
        """Return the whole output of the last turn, with its end if it was not interrupted. Return
        None if there is no turn that can be resumed, or the positions of its shifts are unknown.
        """
        last, shifts = self._core.conversation.last, tuple(self._core.recording.shifts)
        turn, end = last.turn, last.end
        if turn is None or not turn.generates or len(shifts) != len(turn.shifts):
            return None
        return TurnPiece(
            tokens=m.pack_tokens(turn.tokens),
            text=bytes(turn.text),
            surprisals=m.pack_floats(turn.surprisals),
            shifts=shifts,
            begin=last.begin,
            end=None if end is None else end.reason,
            metadata=self._outputs.interrupted_metadata(turn) if end is None else end.metadata,
            error=None if end is None else end.error,
        )

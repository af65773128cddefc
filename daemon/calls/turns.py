"""Calls that compute turns: streamed turns, chats, resumed turns, and several answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import anyio
import msgspec

from ...backends.errors import Cancelled, InferdError, InvalidArgument, error_from_wire
from ...backends.params import SEEDS
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...scheduler.logprobs import describe_logprobs, describe_prompt
from ...scheduler.messages import Position, PromptLogprobs, PromptProgress, Tokens
from ...scheduler.stopping import CONTEXT_FULL, LENGTH, TIME
from ...sessions import Session, TurnOptions
from ...sessions.answers.calls import ToolCallPart, merge_parts
from ...sessions.answers.splitter import AnswerParts, AnswerSplitter
from ...sessions.conversation.state import BeforeInput
from ...sessions.history.infill import InfillText
from ...sessions.turn.turn import ProgressSink, TokensSink, Turn
from ..core import Daemon
from .arguments import turn_options
from .media import stored_messages

LIMIT_REASONS = frozenset(reason.name for reason in (LENGTH, CONTEXT_FULL, TIME))
"""Stop reasons of answers that a limit has cut."""
QUEUE_EVENTS_MAX = 256
"""Events per turn about its position in the queue; they use no credit."""
PROMPT_EVENTS_MAX = 256
"""Parts of a prompt whose end is reported, after an event for its beginning; they use no credit."""


async def stream(daemon: Daemon, request: Request) -> w.TurnResult:
    """Stream a turn token by token, as fast as the reader grants credit."""
    _check_credit(request.params.credit)
    session, turn, splitter = await _start_turn(daemon, request, streams=True)
    request.pass_credit_to(turn.add_credit)
    await finish_turn(request, session, turn)
    return turn_result(session, splitter, turn.tail)


async def chat(daemon: Daemon, request: Request) -> w.TurnResult:
    """Compute a turn and return its whole text."""
    session, turn, splitter = await _start_turn(daemon, request, streams=False)
    await finish_turn(request, session, turn)
    return turn_result(session, splitter, bytes(turn.text))


async def _start_turn(
    daemon: Daemon, request: Request, *, streams: bool
) -> tuple[Session, Turn, AnswerSplitter]:
    """Start a turn on a call's input; if it *streams*, its tokens are sent as events."""
    p: w.StreamParams = request.params
    session = daemon.session(request)
    async with session.turn_input(lambda: _add_input(daemon, request, session)):
        credit = p.credit if streams else -1
        own = TurnOptions(
            options=p.options,
            credit=credit,
            special=False,
            watch=p.queue_events,
            watch_prompt=p.prompt_progress and streams,
        )
        sender = _TokensSender(daemon, request, session)
        turn = await session.start_turn(
            turn_options(p, own),
            sender.send_tokens if streams else None,
            _progress_sender(daemon, request, p),
        )
        splitter = sender.splitter = session.new_splitter(p.options, turn)
    return session, turn, splitter


async def resume(daemon: Daemon, request: Request) -> w.TurnResult:
    """Resume an interrupted turn after the last token that its client has read. If the turn has
    ended, send the rest of it and its end.
    """
    p: w.ResumeParams = request.params
    _check_credit(p.credit)
    daemon.check_open()
    session = daemon.session(request)
    text, splitter = session.resume_splitter(AnswerParts(p.text, p.reasoning), p.raw_text)
    sender = _TokensSender(daemon, request, session, splitter, len(p.tokens))
    if (ended := session.ended_turn()) is not None:
        missed_tokens, missed_text = ended.missed(p.tokens, text)
        if missed_tokens or missed_text:
            sender.send_tokens(Tokens(0, missed_tokens, missed_text))
        if ended.whole.error is not None:
            with metadata_if_cancelled(request, session):
                raise error_from_wire(ended.whole.error)
        return turn_result(session, splitter, b"")
    turn = await session.resume_turn(
        turn_options(
            p,
            TurnOptions(credit=p.credit, watch=p.queue_events, watch_prompt=p.prompt_progress),
        ),
        p.tokens,
        text,
        sender.send_tokens,
        _progress_sender(daemon, request, p),
    )
    request.pass_credit_to(turn.add_credit)
    await finish_turn(request, session, turn)
    return turn_result(session, splitter, turn.tail)


async def finish_turn(request: Request, session: Session, turn: Turn) -> None:
    """Wait for the end of a call's turn. The error of a cancelled turn gets the turn's metadata.

    :raises InferdError: the turn failed.
    """
    with metadata_if_cancelled(request, session, turn):
        await session.finish_turn(turn)


@contextmanager
def metadata_if_cancelled(
    request: Request, session: Session, turn: Turn | None = None
) -> Iterator[None]:
    """Add the metadata of *turn*, or else of the turn that has begun, to the error of a cancelled
    call.
    """
    try:
        yield
    except Cancelled as exc:
        data = exc.data | {"metadata": msgspec.to_builtins(session.metadata(turn))}
        raise Cancelled(exc.message, hint=exc.hint, data=data) from None
    except anyio.get_cancelled_exc_class():
        if turn is not None or session.active:
            metadata = msgspec.to_builtins(session.metadata(turn))
            request.cancelled_data["metadata"] = metadata
        raise


def _check_credit(credit: int) -> None:
    if not 1 <= credit <= w.CREDIT_MAX:
        raise InvalidArgument(
            f"the credit {credit} is out of range", hint=f"use 1 to {w.CREDIT_MAX} events"
        )


def turn_result(session: Session, splitter: AnswerSplitter, text: bytes) -> w.TurnResult:
    """Return the result of a turn with its last *text*."""
    metadata = session.metadata()
    last = splitter.split_last(text, cut=metadata.stop_reason in LIMIT_REASONS)
    return w.TurnResult(
        text=last.text,
        reasoning=last.reasoning,
        tool_calls=tool_call_parts(last.calls),
        metadata=metadata,
    )


def tool_call_parts(parts: Iterable[ToolCallPart]) -> list[w.ToolCallPart]:
    """Return parts of tool calls in the form of protocol messages."""
    return [
        msgspec.convert(part, w.ToolCallPart, from_attributes=True) for part in merge_parts(parts)
    ]


class _TokensSender:
    """Sends a turn's tokens to its client, which already has *offset* of them. *splitter* is set
    before the first report.
    """

    def __init__(
        self,
        daemon: Daemon,
        request: Request,
        session: Session,
        splitter: AnswerSplitter | None = None,
        offset: int = 0,
    ):
        self._daemon, self._request, self._session = daemon, request, session
        self.splitter, self._offset = splitter, offset

    def send_tokens(self, report: Tokens) -> None:
        assert self.splitter is not None
        parts = self.splitter.split(report.text)
        event = w.TokensEvent(
            tokens=report.tokens,
            text=parts.text,
            reasoning=parts.reasoning,
            tool_calls=tool_call_parts(parts.calls) if parts.calls else [],
            offset=self._offset,
        )
        if report.text != parts.text and self.splitter.keeps_raw_text:
            event.raw_text = report.text
        if report.logprobs and (turn := self._session.turn) is not None:
            event.completion_probabilities = describe_logprobs(
                report.logprobs, after_sampling=turn.spec.sampling.post_sampling_probs
            )
        self._daemon.emit(self._request, event)
        self._offset += len(report.tokens)


def _progress_sender(daemon: Daemon, request: Request, params: w.StreamedParams) -> ProgressSink:
    """Return a function that sends at most `QUEUE_EVENTS_MAX` positions in the queue, the progress
    of the prompt in `PROMPT_EVENTS_MAX` parts, and the prompt's logprobs. With `start_event` in
    *params* it also sends the start of the turn.
    """
    remaining, reported = QUEUE_EVENTS_MAX, -1

    def send_progress(report: Position | PromptLogprobs | PromptProgress) -> None:
        nonlocal remaining, reported
        match report:
            case PromptLogprobs():
                logprobs = describe_prompt(report.logprobs)
                event = w.TokensEvent(prompt_logprobs=logprobs, prompt_offset=report.offset)
                daemon.emit(request, event)
            case PromptProgress():
                share = PROMPT_EVENTS_MAX * report.processed // max(1, report.total)
                if share > reported:
                    reported = share
                    daemon.emit(request, _prompt_event(report))
            case Position(position=0):
                if params.start_event:
                    daemon.emit(request, _queue_event(report))
            case Position() if remaining:
                remaining -= 1
                daemon.emit(request, _queue_event(report))

    return send_progress


def _queue_event(report: Position) -> w.QueueEvent:
    """Return a turn's place in the queue as clients get it."""
    return w.QueueEvent(
        position=report.position, waiting=report.waiting, starts_in_s=report.starts_in_s
    )


def _prompt_event(report: PromptProgress) -> w.TokensEvent:
    """Return the progress of a prompt in llama-server's form."""
    return w.TokensEvent(
        prompt_progress={
            "total": report.total,
            "cache": report.cached,
            "processed": report.processed,
            "time_ms": report.ms,
        }
    )


async def _add_input(daemon: Daemon, request: Request, session: Session) -> BeforeInput | None:
    """Add a call's prompt or messages to the history. Return the session before that, or None if
    the call has neither.
    """
    p: w.StreamParams | w.AnswersParams = request.params
    daemon.check_open()
    if p.infill is not None:
        return await session.add_infill(_infill_text(p.infill), p.options)
    if p.messages is not None:
        tokens_max = partial(session.settings.parameters.in_turn, "image-tokens-max", p.options)
        async with stored_messages(daemon, request, p.messages, tokens_max) as messages:
            return await session.add_messages(messages, p.options)
    if p.prompt_tokens is not None:
        return await session.add_tokens(p.prompt_tokens)
    if p.prompt is None:
        return None
    if p.raw:
        return await session.add_text(p.prompt.encode(), p.options)
    return await session.add_messages([{"role": "user", "content": p.prompt}], p.options)


def _infill_text(infill: w.Infill) -> InfillText:
    extra = [(each.get("name", ""), each.get("text", "")) for each in infill.extra]
    return InfillText(infill.prefix, infill.suffix, infill.typed, extra, infill.suffix_first)


ANSWERS_MAX = 16


async def answers(daemon: Daemon, request: Request) -> w.AnswersResult:
    """Answer a prompt several times, each time with another seed. The prompt is computed once.

    The first answer is a turn of the session itself; the others are turns of branches that live as
    long as the call. They start after the first token of the first answer, and share the prompt's
    KV state.
    """
    p: w.AnswersParams = request.params
    session = daemon.session(request)
    _check(p, session)
    branches: list[Session] = []
    try:
        async with session.turn_input(lambda: _add_input(daemon, request, session)):
            if p.n > 1:
                branches = daemon.sessions.fork_session(request.connection, session, p.n - 1)
                for branch in branches:
                    branch.calls_under_way = 1  # so that none is idle before its turn starts
            results = _Answers(p, [session, *branches])
            await results.start_first()
        request.emit(w.AnswersEvent(contexts=[s.handle for s in results.sessions]))
        with metadata_if_cancelled(request, session, results.turn):
            return w.AnswersResult(answers=await results.finish_all())
    finally:
        for branch in branches:
            daemon.sessions.discard_session(branch)


def _check(p: w.AnswersParams, session: Session) -> None:
    if not 1 <= p.n <= ANSWERS_MAX:
        raise InvalidArgument(f"{p.n} answers; the range is 1 … {ANSWERS_MAX}")
    given = (p.prompt, p.prompt_tokens, p.messages, p.infill)
    if all(part is None for part in given) and session.state != "ready":
        raise InvalidArgument("answers needs a prompt or messages", hint="pass one of them")


class _Answers:
    """The answers to one prompt, which is the input of all *sessions*."""

    def __init__(self, p: w.AnswersParams, sessions: Sequence[Session]):
        self.sessions = sessions
        self._p = p
        self.turn: Turn | None = None
        self._prompt_done = anyio.Event()
        """Set when the prompt is computed, or the first turn has ended."""
        self._seed = -1
        self._answers: list[dict[str, Any]] = [{} for _ in sessions]

    async def start_first(self) -> None:
        """Start the first answer."""
        self.turn = await self._start_turn(0, lambda _: self._prompt_done.set())
        self._seed = self.sessions[0].settings.parameters.get("seed")

    async def finish_all(self) -> list[dict[str, Any]]:
        """Wait for the first answer, compute the others, and return all."""
        assert self.turn is not None, "the first answer was started"
        async with anyio.create_task_group() as group:
            group.start_soon(self._compute, 0, self.turn)
            await self._prompt_done.wait()
            for number in range(1, len(self.sessions)):
                group.start_soon(self._compute, number)
        return self._answers

    async def _compute(self, number: int, turn: Turn | None = None) -> None:
        """Compute one answer by *turn*, which is started here unless it is given."""
        session, error = self.sessions[number], None
        try:
            turn = turn or await self._start_turn(number)
            await session.finish_turn(turn)
        except InferdError as exc:
            error = exc
        finally:
            self._prompt_done.set()
        metadata, parts = session.metadata(turn), AnswerParts(b"")
        if turn is not None:
            splitter = session.new_splitter(self._p.options, turn)
            cut = metadata.stop_reason in LIMIT_REASONS
            parts = splitter.split_last(bytes(turn.text), cut=cut)
        self._answers[number] = {
            "text": parts.text,
            "reasoning": parts.reasoning,
            "tool_calls": msgspec.to_builtins(tool_call_parts(parts.calls)),
            "metadata": metadata,
            "error": None if error is None else error.to_wire(),
        }

    async def _start_turn(self, number: int, on_tokens: TokensSink | None = None) -> Turn:
        """Start the turn of answer *number*; the answers share the metadata's probabilities."""
        turn = await self.sessions[number].start_turn(self._options(number), on_tokens)
        turn.probabilities_max //= len(self.sessions)
        return turn

    def _options(self, number: int) -> TurnOptions:
        """Return the options of answer *number*; a given seed is incremented by it. Only the first
        answer has the logprobs of their prompt.
        """
        p = self._p
        seed = {"seed": (self._seed + number) % SEEDS} if self._seed >= 0 else {}
        options = TurnOptions(
            options=p.options | seed,
            special=False,
            quota_checked=number > 0,
            scores_prompt=number == 0,
        )
        return turn_options(p, options)

"""Streamed turns, chats, and the resumption of interrupted turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...backends.errors import InvalidArgument
from ...ipc import messages as w
from ...ipc.server.server_connection import Request
from ...scheduler.messages import Position, TokenLogprob, Tokens
from ...scheduler.output.logprobs import describe_logprobs
from ...sessions import Session, TurnOptions
from ...sessions.history.reasoning import AnswerParts, ReasoningSplitter
from ..core import CallTable, Daemon
from .arguments import turn_options
from .chat_messages import checked_messages

QUEUE_EVENTS_MAX = 256
"""Events per turn about its position in the queue; they use no credit."""


async def stream(daemon: Daemon, request: Request) -> w.TurnResult:
    """Stream a turn token by token, as fast as the reader grants credit."""
    p: w.StreamParams = request.params
    _check_credit(p.credit)
    session = daemon.session(request)
    with session.input.rolled_back_if_refused():
        await add_input(daemon, session, p)
        splitter = session.outputs.new_splitter(p.options)
        send_tokens = _tokens_sender(daemon, request, session, splitter)
        send_place = _place_sender(daemon, request)
        turn = await session.runner.start_turn(_turn_options(p, p.credit), send_tokens, send_place)
    request.on_credit = turn.add_credit
    await session.runner.finish_turn(turn)
    return turn_result(session, splitter, turn.tail)


async def resume(daemon: Daemon, request: Request) -> w.TurnResult:
    """Resume an interrupted turn after the last token that its client has read."""
    p: w.ResumeParams = request.params
    _check_credit(p.credit)
    daemon.check_open()
    session = daemon.session(request)
    options = turn_options(p, TurnOptions(credit=p.credit, watch=p.queue_events))
    text, splitter = session.outputs.resume_splitter(AnswerParts(p.text, p.reasoning))
    send_tokens = _tokens_sender(daemon, request, session, splitter, len(p.tokens))
    send_place = _place_sender(daemon, request)
    turn = await session.runner.resume_turn(options, p.tokens, text, send_tokens, send_place)
    request.on_credit = turn.add_credit
    await session.runner.finish_turn(turn)
    return turn_result(session, splitter, turn.tail)


def _check_credit(credit: int) -> None:
    if not 1 <= credit <= w.CREDIT_MAX:
        raise InvalidArgument(f"a credit of {credit}; the range is 1 … {w.CREDIT_MAX} events")


def turn_result(session: Session, splitter: ReasoningSplitter, text: bytes) -> w.TurnResult:
    """Return the result of a turn with its last *text*."""
    last = splitter.split_last(text)
    return w.TurnResult(
        text=last.text, reasoning=last.reasoning, metadata=session.outputs.metadata()
    )


def _tokens_sender(
    daemon: Daemon,
    request: Request,
    session: Session,
    splitter: ReasoningSplitter,
    position: int = 0,
) -> Callable[[Tokens], None]:
    """Return a function that sends tokens to the client, which already has *position* of them."""

    def send_tokens(report: Tokens) -> None:
        nonlocal position
        text, reasoning = splitter.split(report.text)
        event = w.TokensEvent(
            tokens=report.tokens, text=text, reasoning=reasoning, position=position
        )
        if report.logprobs:
            event.completion_probabilities = _probabilities(session, report.logprobs)
        daemon.emit(request, event)
        position += len(report.tokens)

    return send_tokens


def _probabilities(session: Session, found: list[TokenLogprob]) -> list[dict[str, Any]]:
    turn = session.turn
    after_sampling = turn is not None and turn.spec.sampling.post_sampling_probs
    return describe_logprobs(found, after_sampling=after_sampling)


async def chat(daemon: Daemon, request: Request) -> w.TurnResult:
    """Compute a turn and return its whole text."""
    p: w.StreamParams = request.params
    session = daemon.session(request)
    with session.input.rolled_back_if_refused():
        await add_input(daemon, session, p)
        splitter = session.outputs.new_splitter(p.options)
        turn = await session.runner.start_turn(
            _turn_options(p, -1), None, _place_sender(daemon, request)
        )
    await session.runner.finish_turn(turn)
    return turn_result(session, splitter, bytes(turn.text))


def _place_sender(daemon: Daemon, request: Request) -> Callable[[Position], None]:
    """Return a function that sends the queue position at most QUEUE_EVENTS_MAX times."""
    remaining = QUEUE_EVENTS_MAX

    def send_place(place: Position) -> None:
        nonlocal remaining
        if remaining:
            remaining -= 1
            event = w.QueueEvent(
                position=place.position, waiting=place.waiting, starts_in_s=place.starts_in_s
            )
            daemon.emit(request, event)

    return send_place


async def add_input(daemon: Daemon, session: Session, p: w.StreamParams | w.AnswersParams) -> None:
    """Add a call's prompt or messages to the history."""
    daemon.check_open()
    if p.messages is not None:
        await session.input.add_messages(checked_messages(p.messages), p.options)
    elif p.prompt is not None:
        if p.raw:
            await session.input.add_text(p.prompt.encode())
        else:
            await session.input.add_messages([{"role": "user", "content": p.prompt}], p.options)


def _turn_options(p: w.StreamParams, credit: int) -> TurnOptions:
    options = TurnOptions(options=p.options, credit=credit, special=False, watch=p.queue_events)
    return turn_options(p, options)


CALLS: CallTable = {"stream": stream, "chat": chat, "resume": resume}

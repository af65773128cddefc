"""Turns whose connection is lost: how far they got, and how a session goes on with them."""

from __future__ import annotations

import time
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ....backends.errors import (
    ConnectionLost,
    InferdError,
    SessionExpired,
    ShuttingDown,
    error_from_wire,
)
from ... import messages as w
from ..connection.inflight import InFlight, InFlightT

if TYPE_CHECKING:
    from ..streams.streams import Turn
    from .session import AsyncSession

__all__ = ("Asked", "Next", "Standing", "is_loss", "next_step", "told_so_far")

HINT = (
    "`data` has the tokens and the text that were read; a session with an id goes on from there by"
    " resume(tokens, text), or by itself if it is opened with resume=True"
)


def is_loss(error: InferdError) -> bool:
    """Tell whether a turn that ends with *error* has lost its daemon, and not failed there."""
    return isinstance(error, ConnectionLost | ShuttingDown)


def told_so_far(error: InferdError, tokens: list[int], text: str) -> InferdError:
    """Return *error*, saying how far the turn got."""
    fields = error.to_wire()
    fields["message"] = f"{error.message}; {len(tokens)} tokens of the answer were read"
    fields["hint"] = f"{error.hint}; {HINT}"
    fields["data"] = {**error.data, "tokens": list(tokens), "text": text}
    return error_from_wire(fields)


class Standing(NamedTuple):
    """How far a session is: turns begun, and tokens of its history."""

    turns: int
    tokens: int


class Next(Enum):
    """How a turn goes on over another connection."""

    ASK = auto()
    """Nothing of it had arrived: it is asked for once more."""
    ANSWER = auto()
    """Its input had arrived, and no turn began: that input is answered."""
    RESUME = auto()
    """It had begun and has no end: the rest is told."""
    NOTHING = auto()
    """It ended while nobody heard it, or the daemon does not know it any more."""


def next_step(
    before: Standing | None, after: Standing, *, detached: bool, told: int, refused: bool
) -> Next:
    """Decide how a turn goes on of which *told* tokens were read: *before* is how the session stood
    when it was asked for (None: that was not reached), *after* how it stands now. *detached*: its
    last turn has no end. *refused*: the daemon has said that the turn had not begun.
    """
    if before is None or (after == before and not told):
        return Next.ASK
    if detached and after.turns > before.turns:
        return Next.RESUME
    if not told and (refused or after.turns == before.turns):
        return Next.ANSWER
    return Next.NOTHING


class Asked:
    """A turn that a session asks for, once, and again where its connection was lost.

    *params* are for the call `stream`, or `resume`, with what its caller had of the answer.
    """

    def __init__(self, session: AsyncSession, params: w.StreamParams | w.ResumeParams):
        self._session, self._params = session, params
        self._before: Standing | None = None

    async def start(self, kind: type[InFlightT], deadline: float) -> InFlightT:
        """Send the request, once the session's turn before has ended."""
        await self._session.settle(deadline)
        if not self._session.resumes:
            return await self._send(kind, deadline, self._params)
        try:
            self._before = await self._standing()
            return await self._send(kind, deadline, self._params)
        except InferdError as exc:
            if is_loss(exc):
                return _ended(kind, deadline, exc)
            raise

    async def _standing(self) -> Standing:
        try:
            return await self._session.attachment.standing()
        except SessionExpired:
            await self._session.wake()
            return await self._session.attachment.standing()

    async def _send(
        self, kind: type[InFlightT], deadline: float, params: w.StreamParams | w.ResumeParams
    ) -> InFlightT:
        session = self._session
        params.context = session.context
        request = kind("resume" if isinstance(params, w.ResumeParams) else "stream", deadline)
        await session.client.connection.start_request(request, params)
        session.took_turn(request)
        return request

    async def go_on(self, kind: type[InFlightT], turn: Turn, lost: InFlight) -> InFlightT:
        """Attach to the session again and send what makes the turn go on.

        :raises InferdError: that is not possible.
        """
        session = self._session
        until = min(turn.deadline, time.monotonic() + session.client.resume_timeout)
        await session.attach_again(until)
        assert lost.error is not None, "a turn without an error needs no going on"
        refused = not lost.lost and isinstance(lost.error, ShuttingDown)
        try:
            params = await self._next(turn, refused)
            if params is not None:
                return await self._send(kind, turn.deadline, params)
        except InferdError as exc:
            if is_loss(exc):
                return _ended(kind, turn.deadline, exc)
            raise
        raise ConnectionLost(
            "the turn ended in the daemon while no connection was there",
            hint="the session's history has what it said: ask the next question, or `rewind`",
        )

    async def _next(self, turn: Turn, refused: bool) -> w.StreamParams | w.ResumeParams | None:
        """Return the params with which the turn goes on; None: it does not."""
        attachment, asked = self._session.attachment, self._params
        after = await attachment.standing()
        step = next_step(
            self._before,
            after,
            detached=await attachment.is_detached(),
            told=len(turn.tokens),
            refused=refused,
        )
        resumed = isinstance(asked, w.ResumeParams)
        if step is Next.RESUME:
            return self._rest(turn)
        if step is Next.NOTHING or (step is Next.ANSWER and resumed):
            return None
        if step is Next.ANSWER and isinstance(asked, w.StreamParams):
            self._params = msgspec.structs.replace(asked, prompt=None, messages=None)
        self._before = after
        return self._params

    def _rest(self, turn: Turn) -> w.ResumeParams:
        asked, tokens, text = self._params, turn.tokens, bytes(turn.text)
        if isinstance(asked, w.ResumeParams):
            return msgspec.structs.replace(
                asked,
                tokens=[*asked.tokens, *tokens],
                text=asked.text + text,
                reasoning=asked.reasoning + turn.reasoning,
            )
        return w.ResumeParams(
            context=asked.context,
            tokens=list(tokens),
            text=text,
            reasoning=bytes(turn.reasoning),
            priority=asked.priority,
            queue_timeout_s=asked.queue_timeout_s,
            timeout_s=asked.timeout_s,
            traceparent=asked.traceparent,
            watch=asked.watch,
        )


def _ended(kind: type[InFlightT], deadline: float, error: InferdError) -> InFlightT:
    """Return a request that has failed before it was sent."""
    request = kind("stream", deadline)
    request.answered = request.lost = True
    request.finish(None, error)
    return request

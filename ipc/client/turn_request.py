"""A session's request for a streamed turn, and the decision how it continues after a loss."""

from __future__ import annotations

import time
from enum import Enum, auto

import msgspec

from ...backends.errors import ConnectionLost, InferdError, SessionExpired, ShuttingDown
from .. import messages as w
from .attachment import SessionProgress, TurnsUnderWay
from .caller import is_loss, is_node_loss, send_request
from .connection.core import InFlight
from .streams import StreamedTurn
from .turn_settings import stream_call


class RecoveryStep(Enum):
    """The continuation of a turn over another connection."""

    REPEAT = auto()
    """The daemon received nothing of the turn: request it again."""
    ANSWER = auto()
    """The daemon received its input, but no turn began: request an answer to that input."""
    RESUME = auto()
    """The turn began: stream the rest."""
    FAIL = auto()
    """The daemon no longer has the turn."""


def recovery_step(
    before: SessionProgress | None,
    after: SessionProgress,
    *,
    resumable: bool,
    tokens_read: int,
    refused: bool,
) -> RecoveryStep:
    """Return how a turn continues of which *tokens_read* tokens were read.

    *before* is the session's progress when the turn was requested (None if it was not requested),
    *after* the present progress. *resumable* means that the daemon has the rest of the session's
    last turn, and *refused* that it answered that the turn had not begun.
    """
    if before is None or (after == before and not tokens_read):
        return RecoveryStep.REPEAT
    if resumable and after.turns > before.turns:
        return RecoveryStep.RESUME
    if not tokens_read and (refused or after.turns == before.turns):
        return RecoveryStep.ANSWER
    return RecoveryStep.FAIL


class TurnRequest:
    """A session's request for a streamed turn, sent again after its connection was lost."""

    def __init__(
        self, turns: TurnsUnderWay, params: w.StreamParams | w.ResumeParams, session: object
    ):
        self._session = session
        """Kept open while its turn is read: a session that nothing refers to is closed."""
        self._turns, self._attachment, self._params = turns, turns.attachment, params
        self._before: SessionProgress | None = None

    async def send(self, deadline: float) -> InFlight:
        """Send the request, once the session's previous turn has ended."""
        await self._turns.end_previous(deadline)
        if not self._attachment.settings.resume:
            return await self._send(deadline, self._params)
        try:
            self._note_before(await self._progress())
            return await self._send(deadline, self._params)
        except InferdError as exc:
            if is_loss(exc):
                return _failed_request(deadline, exc)
            raise

    def _note_before(self, before: SessionProgress) -> None:
        """Store the session's progress before the turn; a turn to resume has begun already."""
        begun = isinstance(self._params, w.ResumeParams)
        self._before = before._replace(turns=before.turns - begun)

    async def _progress(self) -> SessionProgress:
        try:
            return await self._attachment.progress()
        except SessionExpired:
            await self._attachment.open_again()
            return await self._attachment.progress()

    async def _send(self, deadline: float, params: w.StreamParams | w.ResumeParams) -> InFlight:
        params.context = self._attachment.live_context
        request = InFlight(stream_call(params), deadline)
        client = self._turns.client
        connection = client._open_connection
        try:
            await send_request(connection, client._driver, request, params)
            self._turns.add_request(request)
        except BaseException:
            connection.abandon_request(request)
            raise
        return request

    async def recover(self, turn: StreamedTurn, lost: InFlight) -> InFlight:
        """Attach to the session again and send a request for the rest of the turn.

        :raises InferdError: the turn cannot be continued.
        """
        until = min(turn.deadline, time.monotonic() + self._turns.client._resume_timeout)
        assert lost.error is not None, "a turn without an error needs no recovery"
        await self._attachment.attach_again(until, lost.error)
        refused = not lost.lost and isinstance(lost.error, ShuttingDown)
        try:
            params = await self._next_params(turn, refused)
            if params is not None:
                return await self._send(turn.deadline, params)
        except SessionExpired:
            if is_node_loss(lost.error):  # the node of the new context was lost, too
                return _failed_request(turn.deadline, lost.error)
            raise
        except InferdError as exc:
            if is_loss(exc):
                return _failed_request(turn.deadline, exc)
            raise
        raise ConnectionLost(
            "the daemon no longer has the turn's output",
            hint="the session's history has its answer: continue with the next turn, or `rewind`",
        )

    async def _next_params(
        self, turn: StreamedTurn, refused: bool
    ) -> w.StreamParams | w.ResumeParams | None:
        """Return the params that continue the turn, or None if it cannot continue."""
        params = self._params
        after = await self._attachment.progress()
        step = recovery_step(
            self._before,
            after,
            resumable=await self._attachment.can_resume(),
            tokens_read=len(turn.tokens),
            refused=refused,
        )
        if step is RecoveryStep.RESUME:
            return self._rest_params(turn)
        if step is RecoveryStep.FAIL:
            return None
        if step is RecoveryStep.ANSWER:
            if isinstance(params, w.ResumeParams):
                return None
            self._params = msgspec.structs.replace(
                params, prompt=None, prompt_tokens=None, messages=None, infill=None
            )
        self._note_before(after)
        return self._params

    def _rest_params(self, turn: StreamedTurn) -> w.ResumeParams:
        params = self._params
        tokens, text, reasoning = list(turn.tokens), bytes(turn.text), bytes(turn.reasoning)
        raw_text = bytes(turn.raw_text)
        if isinstance(params, w.ResumeParams):
            tokens, text = params.tokens + tokens, params.text + text
            reasoning = params.reasoning + reasoning
            raw_text = (params.raw_text or params.text) + raw_text
        return w.ResumeParams(
            context=params.context,
            tokens=tokens,
            text=text,
            reasoning=reasoning,
            raw_text=raw_text,
            **{name: getattr(params, name) for name in w.StreamedParams.__struct_fields__},
        )


def _failed_request(deadline: float, error: InferdError) -> InFlight:
    """Return a request that failed before it was sent."""
    request = InFlight("stream", deadline)
    request.answered = request.lost = True
    request.finish(None, error)
    return request

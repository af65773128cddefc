"""Several answers to one prompt, which is computed once.

The first answer is a turn of the session itself; the others are turns of branches that live as long
as the call. They start after the first token of the first answer, and share the prompt's KV state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from ...backends.errors import InferdError, InvalidArgument
from ...backends.params import SEEDS
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ...sessions import Session, TurnOptions
from ...sessions.answers.splitter import AnswerParts
from ...sessions.turn.turn import TokensSink, Turn
from ..core import Daemon
from .arguments import turn_options
from .turns import add_input, metadata_if_cancelled, tool_call_parts

ANSWERS_MAX = 16


async def answers(daemon: Daemon, request: Request) -> w.AnswersResult:
    """Answer a prompt several times, each time with another seed."""
    p: w.AnswersParams = request.params
    session = daemon.session(request)
    _check(p, session)
    branches: list[Session] = []
    try:
        async with session.turn_input(lambda: add_input(daemon, session, p)):
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
    given = (p.prompt, p.prompt_tokens, p.messages)
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
        parts = AnswerParts(b"")
        if turn is not None:
            parts = session.new_splitter(self._p.options, turn).split_last(bytes(turn.text))
        self._answers[number] = {
            "text": parts.text,
            "reasoning": parts.reasoning,
            "tool_calls": msgspec.to_builtins(tool_call_parts(parts.calls)),
            "metadata": session.metadata(turn),
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

"""A turn that is computed token by token, each when it is asked for."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from ....backends.errors import ContextFull, EndOfSequence
from ... import messages as w
from ...handles import Context
from ...payloads import Priority, TensorLike
from ...traceparent import traceparent_of
from ..connection.connection import Connection

if TYPE_CHECKING:
    from ..sessions.session import AsyncSession

__all__ = ("AsyncPull", "PullTurn")


class PullTurn:
    """What a session knows of a pull: `left` by its reader, `ended` on the daemon or about to."""

    __slots__ = ("caller", "connection", "context", "ended", "left")

    def __init__(self, connection: Connection, context: Context, caller: int):
        self.connection, self.context, self.caller = connection, context, caller
        self.left = self.ended = False

    def leave(self) -> None:
        """End the turn soon; nobody waits for it. The session's next call makes sure of it."""
        self.left = True
        params = w.ContextParams(context=self.context)
        self.connection.run_soon(lambda: self.connection.post_request("fini_single", params))


class AsyncPull(AsyncIterator[str]):
    """The pieces of a turn, each computed when it is asked for (`compute_single`).

    Leaving the loop early ends the turn as for a stream; the history keeps what was read. A piece
    is empty where a character's bytes, or a stop text, are not yet whole.
    """

    def __init__(
        self,
        session: AsyncSession,
        prompt: TensorLike | None,
        priority: Priority,
        timeout: float | None,
        traceparent: str | None,
    ):
        self.metadata: dict[str, Any] = {}
        self._session, self._prompt = session, prompt
        self._priority, self._timeout = priority, timeout
        self._traceparent = traceparent_of(traceparent)
        self._turn: PullTurn | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def __anext__(self) -> str:
        turn = self._turn
        if turn is None:
            turn = self._turn = await self._session.begin_pull(self._prompt, self._timeout)
        if turn.ended:
            raise StopAsyncIteration
        try:
            piece = await self._session.client.compute_single(
                turn.context,
                priority=self._priority,
                timeout=self._timeout,
                traceparent=self._traceparent,
            )
        except (EndOfSequence, ContextFull):
            turn.ended = True
        except BaseException:
            turn.leave()
            raise
        else:
            return self._decoder.decode(piece)
        await self._read_metadata(turn)
        raise StopAsyncIteration

    async def _read_metadata(self, turn: PullTurn) -> None:
        text = await self._session.client.get_output(turn.context, 1, timeout=self._timeout)
        self.metadata = self._session.metadata = msgspec.json.decode(text, type=dict[str, Any])

    async def aclose(self) -> None:
        """End the turn if it has not ended."""
        turn = self._turn
        if turn is not None and not turn.ended:
            turn.ended = True
            await self._session.client.fini_single(turn.context)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def leave(self) -> None:
        """End the turn soon, on the connection's loop, if it has not ended."""
        turn = self._turn
        if turn is not None and not turn.ended and not turn.left:
            turn.leave()

    def __del__(self) -> None:
        self.leave()

"""The turns of a session that are under way, streamed or pulled."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any

import anyio

from ... import messages as w
from ...handles import Context
from ...payloads import TensorLike
from ..connection.connection import Connection
from ..connection.inflight import InFlight
from ..operations import AsyncOperations
from ..streams.turn import SETTLE_S_MAX
from .attachment import Attachment

_APPEND = b'{"append":true}'

calling_thread: ContextVar[int] = ContextVar("calling_thread", default=0)
"""The thread that a call of the synchronous client comes from; 0 in tasks of the user's own."""


def _caller() -> int:
    return calling_thread.get() or anyio.get_current_task().id


class PulledTurn:
    """A pulled turn: `abandoned` by its reader, `ended` on the daemon or about to."""

    __slots__ = ("abandoned", "caller", "connection", "context", "ended")

    def __init__(self, connection: Connection, context: Context, caller: int):
        self.connection, self.context, self.caller = connection, context, caller
        self.abandoned = self.ended = False

    def abandon(self) -> None:
        """End the turn soon, without waiting. The session's next call makes sure of it."""
        self.abandoned = True
        params = w.ContextParams(context=self.context)
        self.connection.run_soon(lambda: self.connection.post_request("fini_single", params))


class TurnsUnderWay:
    """The turns of one session that have not ended, with the tasks or threads that read them.

    `metadata` is that of the last turn that ended; `appends`: the daemon appends what
    `set_input` gives to the history.
    """

    def __init__(self, client: AsyncOperations, attachment: Attachment, *, appends: bool = False):
        self.client, self.attachment, self.appends = client, attachment, appends
        self.metadata: dict[str, Any] = {}
        self._turns: list[tuple[InFlight, int]] = []
        self._pull: PulledTurn | None = None

    def add_request(self, request: InFlight) -> None:
        """Add the request of a turn that has begun."""
        self.attachment.has_history = True
        # More than one only until the daemon has refused the others as `SessionBusy`.
        self._turns = [turn for turn in self._turns if not turn[0].answered]
        self._turns.append((request, _caller()))

    async def start_pull(self, prompt: TensorLike | None, timeout: float) -> PulledTurn:
        """Set the input of a pulled turn and add it."""
        await self.end_previous()
        context = self.attachment.live_context
        if prompt is not None and not self.appends:
            await self.client.set_input(context, 1, _APPEND, timeout=timeout)
            self.appends = True
        if prompt is not None:
            await self.client.set_input(context, 0, prompt, timeout=timeout)
        self._pull = PulledTurn(self.client.connection, self.attachment.live_context, _caller())
        return self._pull

    async def end_previous(self, until: float = math.inf) -> None:
        """End the previous turn, if it was abandoned or its reader makes this call, and wait for
        its end.

        A turn that another task reads goes on; the daemon then answers `SessionBusy`.
        """
        await self.attachment.ensure_connected(until)
        pull, caller = self._pull, _caller()
        if pull is not None and not pull.ended and (pull.abandoned or pull.caller == caller):
            pull.ended = True
            if not pull.connection.lost:
                await self.client.fini_single(pull.context)
        for turn, turn_caller in self._turns:
            if turn.abandoned or turn_caller == caller:
                turn.connection.abandon_request(turn)
                with anyio.move_on_after(SETTLE_S_MAX):
                    await turn.wait_answered()

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Set the metadata of a turn that has ended."""
        self.metadata = metadata

    def abandon_streams(self) -> None:
        """Cancel the streamed turns on the daemon, without waiting."""
        for turn, _ in self._turns:
            turn.connection.abandon_request(turn)

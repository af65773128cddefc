"""A session's turns under way, streamed or pulled."""

from __future__ import annotations

import math
from functools import partial
from threading import Lock

from ... import messages as w
from ...handles import Context
from ...payloads import TensorLike
from ..connection.core import ConnectionCore
from ..connection.inflight import InFlight, no_metadata
from ..operations import AsyncOperations
from ..results import Metadata
from ..streams.turn import SETTLE_S_MAX
from .attachment import Attachment

_APPEND = b'{"append":true}'


class PulledTurn:
    """A pulled turn: `abandoned` by its reader, `ended` in the daemon or by a call under way."""

    __slots__ = ("abandoned", "caller", "connection", "context", "ended")

    def __init__(self, connection: ConnectionCore, context: Context, caller: int):
        self.connection, self.context, self.caller = connection, context, caller
        self.abandoned = self.ended = False

    def abandon(self) -> None:
        """End the turn soon, without waiting. The session's next call ensures that it has ended."""
        self.abandoned = True
        params = w.ContextParams(context=self.context)
        self.connection.run_soon(partial(self.connection.post_request, "fini_single", params))


class TurnsUnderWay:
    """A session's turns that have not ended, with the tasks or threads that read them.

    With `appends` the daemon appends the input of `set_input` to the history.
    """

    def __init__(self, client: AsyncOperations, attachment: Attachment, *, appends: bool = False):
        self.client, self.attachment, self.appends = client, attachment, appends
        self._metadata = no_metadata()
        self._turns: list[tuple[InFlight, int]] = []
        self._lock = Lock()
        """Held while `_metadata` and `_turns` change, as threads may share a session."""
        self._pull: PulledTurn | None = None

    def add_request(self, request: InFlight) -> None:
        """Add the request of a turn that has begun."""
        self.attachment.has_history = True
        turn = (request, self.client._driver.caller())
        with self._lock:
            # There is more than one only until the daemon has refused the others (`SessionBusy`).
            self._metadata = self.metadata
            self._turns = [*self._unanswered(), turn]

    @property
    def metadata(self) -> Metadata:
        """The metadata of the last turn that ended."""
        ended = [request.metadata for request, _ in self._turns if request.metadata]
        return ended[-1] if ended else self._metadata

    async def start_pull(self, prompt: TensorLike | None, timeout: float | None) -> PulledTurn:
        """Set the input of a pulled turn, and return the turn."""
        await self.end_previous()
        context = self.attachment.live_context
        if prompt is not None and not self.appends:
            await self.client.set_input(context, 1, _APPEND, timeout=timeout)
            self.appends = True
        if prompt is not None:
            await self.client.set_input(context, 0, prompt, timeout=timeout)
        context = self.attachment.live_context
        self._pull = PulledTurn(self.client._open_connection, context, self.client._driver.caller())
        return self._pull

    async def end_previous(self, until: float = math.inf) -> None:
        """End the previous turn and wait for its end, if it was abandoned or its reader calls this.

        A turn that another task reads continues; the daemon then answers `SessionBusy`.
        """
        await self.attachment.ensure_connected(until)
        pull, caller = self._pull, self.client._driver.caller()
        if pull is not None and not pull.ended and (pull.abandoned or pull.caller == caller):
            pull.ended = True
            if not pull.connection.lost:
                await self.client.fini_single(pull.context)
        for turn, turn_caller in self._turns:
            if turn.abandoned or turn_caller == caller:
                turn.connection.abandon_request(turn)
                await turn.wait_answered(SETTLE_S_MAX)

    def set_metadata(self, metadata: Metadata) -> None:
        """Set the metadata of the last turn that has ended."""
        with self._lock:
            self._metadata = metadata
            self._turns = self._unanswered()

    def _unanswered(self) -> list[tuple[InFlight, int]]:
        return [turn for turn in self._turns if not turn[0].answered]

    def abandon_streams(self) -> None:
        """Cancel the streamed turns without waiting."""
        for turn, _ in self._turns:
            turn.connection.abandon_request(turn)

"""A session's attachment to the daemon: its lease on a model, its context, its connection."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar

import msgspec

from ...backends.errors import (
    ConnectionLost,
    InferdError,
    InvalidArgument,
    SessionExpired,
    ShuttingDown,
    Timeout,
)
from .. import messages as w
from ..handles import Context, Graph
from ..names import Priority
from ..payloads import Config, TensorLike, json_text
from .caller import CLOSE_S_MAX, is_loss, is_node_loss, retry_pauses
from .connection.core import ConnectionCore, InFlight, no_metadata
from .operations import AsyncOperations
from .results import Metadata
from .streams import SETTLE_S_MAX
from .wasi_calls import ProgressCallback

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


_CLOSED_ERRORS = (InvalidArgument, SessionExpired, ConnectionLost, ShuttingDown, Timeout)
"""Errors of a closing call whose object is already closed or lost, or that takes too long."""
Handle = TypeVar("Handle", bound=int)
LossCallback: TypeAlias = Callable[[InferdError], None]


@dataclass(kw_only=True, slots=True)
class ClientSessionSettings:
    """Keywords that open a session; they are also its turns' defaults.

    Owned by the session, whose calls change `system` and `priority`.
    """

    model: str
    session_id: str | None = None
    system: str | None = None
    persist: bool = True
    from_state: str | None = None
    resume: bool = False
    raw: bool = False
    priority: Priority = "normal"
    queue_timeout: float | None = None
    options: dict[str, Any] | None = None
    config: Config | None = None
    graph: Graph | None = None
    on_progress: ProgressCallback | None = None
    on_loss: LossCallback | None = None

    def __post_init__(self) -> None:
        if self.resume and self.session_id is None:
            raise InvalidArgument(
                "resume needs a session_id", hint="pass a session_id, by which to attach again"
            )
        if self.graph is not None and (self.resume or self.config is not None):
            raise InvalidArgument(
                "a session on a graph has neither resume nor config: the graph ends with its"
                " connection, and has a config of its own",
                hint="leave out one of the two",
            )
        if self.system is not None and self.from_state is not None:
            raise InvalidArgument(
                "a session from a state takes no system prompt: the state has one",
                hint="pass either system or from_state",
            )


class OpeningKeywords(TypedDict, total=False):
    """A context's priority, and the keywords of its wait for a place."""

    priority: Priority
    queue_timeout: float


class SessionProgress(NamedTuple):
    """A session's progress: the number of turns begun, and of tokens in its history."""

    turns: int
    tokens: int


class Attachment:
    """A session's graph and context, both None while it is not open, and their `connection`.

    If the settings have `resume`, it attaches again by the session's id after its connection was
    lost. If `has_history` is set, the daemon must then still have the history. Each *until* is a
    deadline on the monotonic clock.
    """

    def __init__(self, client: AsyncOperations, settings: ClientSessionSettings):
        self.settings = settings
        self.graph: Graph | None = None
        self.context: Context | None = None
        self.connection: ConnectionCore | None = None
        self.has_history = False
        self._client = client
        self._leases = False
        self._renewing: AbstractAsyncContextManager[Any] | None = None

    @property
    def lost(self) -> bool:
        """Whether the connection of graph and context was lost."""
        return self.connection is not None and self.connection.lost

    @property
    def live_context(self) -> Context:
        """The context of an open session.

        :raises ConnectionLost: its connection was lost, and the session does not resume.
        """
        context = require_open(self.context)
        if self.connection is not None and self.lost and not self.settings.resume:
            self.connection.raise_if_lost()
        return context

    async def open(self) -> None:
        """Lease the model, open the context, and set its system prompt and options."""
        if self.settings.resume and not self._client._reconnects:
            await self._client._driver.reconnect()
        else:
            await self._client._live_connection(math.inf)
        try:
            await self._open_context()
            await self._initialize()
        except InferdError as exc:
            if self.connection is None or not self.settings.resume or not is_loss(exc):
                raise
            lost = self.connection
            await self.close()
            await self._renew(lost, time.monotonic() + self._client._resume_timeout, exc)
            await self._initialize()

    async def _open_context(self, until: float = math.inf) -> None:
        """Lease the model and open the context; if either fails, close both.

        :raises Timeout: *until* has passed.
        """
        client, settings = self._client, self.settings

        def timeout() -> float:
            return min(client._seconds(None), until - time.monotonic())

        self.connection = client._open_connection
        try:
            self.graph = settings.graph
            if self.graph is None:
                self.graph = await client.load_by_name_with_config(
                    settings.model,
                    json_text(settings.config),
                    on_progress=settings.on_progress,
                    timeout=timeout(),
                )
                self._leases = True
            keywords: OpeningKeywords = {}
            if settings.queue_timeout:
                keywords["queue_timeout"] = settings.queue_timeout
            if settings.queue_timeout or settings.priority != "normal":
                keywords["priority"] = settings.priority
            if settings.session_id is None:
                self.context = await client.init_execution_context(
                    self.graph, from_state=settings.from_state, timeout=timeout(), **keywords
                )
            else:
                self.context = await client.init_execution_context_with_session_id(
                    self.graph,
                    settings.session_id,
                    persist=settings.persist,
                    from_state=settings.from_state,
                    timeout=timeout(),
                    **keywords,
                )
        except BaseException:
            await self.close()
            raise

    async def _initialize(self) -> None:
        context, settings = self.live_context, self.settings
        self.has_history = context.attached or settings.from_state is not None
        if settings.system is not None and not context.attached:
            await self._client.reset(context, settings.system)
            self.has_history = True
        if settings.options:
            await self._client.set_options(context, settings.options)

    def branch(self, context: Context, settings: ClientSessionSettings) -> Attachment:
        """Return the attachment of a branch, which shares this lease."""
        branch = Attachment(self._client, settings)
        branch.graph, branch.context, branch.connection = self.graph, context, self.connection
        branch.has_history = True
        return branch

    async def close(self) -> None:
        """Close the context and end the lease; a session with an id can be attached again."""
        context, graph = self.context, self.graph if self._leases else None
        self.context = self.graph = None
        self._leases = False
        if self.lost:
            return  # the daemon has closed them
        until = time.monotonic() + CLOSE_S_MAX
        with self._client._driver.shield():
            if context is not None:
                with suppress(*_CLOSED_ERRORS):
                    timeout = until - time.monotonic()
                    await self._client.finalize_execution_context(
                        context, keep=True, timeout=timeout
                    )
            if graph is not None:
                with suppress(*_CLOSED_ERRORS):
                    timeout = until - time.monotonic()
                    await self._client.unload(graph, keep=True, timeout=timeout)

    def close_unused(self) -> bool:
        """Close a context that was not closed, soon and without waiting; return whether it was
        open. `__del__` calls this, at any point and in any thread.
        """
        context, connection = self.context, self.connection
        graph = self.graph if self._leases else None
        self.context = self.graph = None
        if context is None or connection is None or connection.lost or connection.forked:
            return False

        def close() -> None:
            connection.post_request(
                "finalize_execution_context", w.FinalizeParams(context=context, keep=True)
            )
            if graph is not None:
                connection.post_request("unload", w.UnloadParams(graph=graph, keep=True))

        connection.run_soon(close)
        return True

    async def ensure_connected(self, until: float = math.inf) -> None:
        """Attach again if the connection was lost and the session resumes."""
        if self.settings.resume and self.lost:
            await self.attach_again(min(until, time.monotonic() + self._client._resume_timeout))

    async def attach_again(self, until: float, error: InferdError | None = None) -> None:
        """Attach over a new connection after the present one has ended; retry until the deadline.
        If *error* is the loss of a node, the connection stays, and the session is opened on it.

        :raises SessionExpired: the daemon no longer has the session.
        """
        assert self.connection is not None, "a session that was never open is not attached again"
        await self._renew(self.connection, until, error)
        await self._restore()

    async def open_again(self) -> None:
        """Open again a context that was idle for too long, over the same connection."""
        await self.close()
        await self._open_context()
        await self._restore()

    async def _restore(self) -> None:
        if require_open(self.context).attached:
            return
        if self.has_history:
            await self.close()
            raise SessionExpired(
                f"the daemon no longer has session {self.settings.session_id!r}",
                hint="open it again to begin without a history; `inferd status` may show the cause",
            )
        await self._initialize()

    async def _renew(
        self, lost: ConnectionCore, until: float, cause: InferdError | None = None
    ) -> None:
        """Attach over a new connection after *lost* has ended; retry until the deadline. If *cause*
        is the loss of a node, *lost* does not end, and is used again.

        `on_loss` is called first, so that a user learns the reason of the wait.

        :raises InferdError: the error of the last attempt.
        """
        if self._renewing is None:  # a lock takes a kilobyte, which few sessions need
            self._renewing = self._client._driver.lock()
        async with self._renewing:
            if self.connection is not lost:
                return  # another task has attached again
            loss = cause or lost.loss
            if self.settings.on_loss is not None and loss is not None:
                self.settings.on_loss(loss)
            error: InferdError = ConnectionLost(
                f"no new connection to {self._client.path} within the time",
                hint="raise resume_timeout, or see `inferd status`",
            )
            if cause is not None and is_node_loss(cause):
                await self.close()
            else:
                await lost.wait_lost(until)
            for pause_s in retry_pauses():
                try:
                    return await self._reconnect(until)
                except InferdError as exc:
                    if time.monotonic() > until:
                        break
                    if not (exc.retryable or self.lost or isinstance(exc, ConnectionLost)):
                        raise
                    error = exc
                if time.monotonic() + pause_s > until:
                    break
                await self._client._driver.sleep(pause_s)
            raise error

    async def _reconnect(self, until: float) -> None:
        await self._client._driver.reconnect()
        try:
            await self._open_context(until)
        except ShuttingDown:  # the old daemon still answers; after its exit the next one listens
            if self.connection is not None:
                await self.connection.wait_lost(until)
            raise

    async def progress(self) -> SessionProgress:
        """Return the session's progress, as reported by the daemon."""
        session_id = self.settings.session_id
        for session in await self._client.sessions(session_id=session_id):
            if session["context"] == self.context:
                return SessionProgress(session["turns"], session["tokens"])
        raise SessionExpired(f"the session {session_id!r} is no longer open")

    async def can_resume(self) -> bool:
        """Return whether a session that was just attached can resume its last turn, because the
        turn was interrupted, or has ended and its end can be read again.
        """
        context = require_open(self.context)
        metadata = msgspec.json.decode(await self._client.get_output(context, 1))
        return metadata["stop_reason"] is not None


def require_open(handle: Handle | None) -> Handle:
    """Return the *handle* of an open session.

    :raises InvalidArgument: the session is not open.
    """
    if handle is None:
        raise InvalidArgument(
            "the session is not open", hint="use it as `with client.session(…) as session:`"
        )
    return handle

"""The natural client's conversation: a lease on a model, a context on it, and its turns."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from ..backends.errors import ConnectionLost, InvalidArgument, SessionExpired, ShuttingDown
from . import messages as w
from .calls import ProgressCallback
from .handles import Context, Graph
from .inflight import InFlight, K
from .payloads import Config, Priority, Prompt, TensorLike, json_text
from .pull import AsyncPull, PullTurn
from .streams import SETTLE_S_MAX, AsyncStream, QueueCallback, Reply, queue_events

if TYPE_CHECKING:
    from .client import AsyncClient

__all__ = ("AsyncSession", "calling_thread")

CLOSE_S_MAX = 5.0
Handle = TypeVar("Handle", bound=int)
_APPEND = b'{"append":true}'

calling_thread: ContextVar[int] = ContextVar("calling_thread", default=0)
"""The thread that a call of the synchronous twin comes from; 0 in tasks of the user's own."""


def _caller() -> int:
    return calling_thread.get() or anyio.get_current_task().id


class AsyncSession:
    """A conversation with a model; `AsyncClient.session` makes it. One turn at a time.

    Opened and closed by `async with`: it loads the model if need be and leaves nothing behind, also
    where opening fails. A turn whose stream was left early is cancelled by the next call of the
    same task; a turn that another task reads makes it `SessionBusy`.
    """

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        *,
        system: str | None = None,
        session_id: str | None = None,
        persist: bool = True,
        raw: bool = False,
        priority: Priority = "normal",
        options: dict[str, Any] | None = None,
        config: Config | None = None,
        on_progress: ProgressCallback | None = None,
    ):
        self.client = client
        self.model = model
        self.session_id = session_id
        self.metadata: dict[str, Any] = {}
        self._system, self._raw, self._priority = system, raw, priority
        self._persist = persist
        self._options, self._config, self._on_progress = options, config, on_progress
        self._graph: Graph | None = None
        self._context: Context | None = None
        self._turns: list[tuple[InFlight, int]] = []
        self._pull: PullTurn | None = None
        self._appends = False
        self._trunk: AsyncSession | None = None
        """Where this one branched off: the lease on the model is that session's."""
        self._branches: set[AsyncSession] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self.model} [context {self._context}]>"

    @property
    def graph(self) -> Graph:
        """The session's lease on the model, and what the daemon said of it."""
        return _opened(self._graph)

    @property
    def context(self) -> Context:
        """The execution context's handle, for the wasi-nn calls."""
        return _opened(self._context)

    @property
    def attached(self) -> bool:
        """Whether the session was there before, with its history."""
        return self.context.attached

    async def __aenter__(self) -> Self:
        if self._trunk is not None and self._context is not None:
            return self
        if self._graph is not None:
            raise InvalidArgument("the session is open already", hint="make another one")
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def _open(self) -> None:
        client = self.client
        self._graph = await client.load_by_name_with_config(
            self.model, json_text(self._config), on_progress=self._on_progress
        )
        if self.session_id is None:
            self._context = await client.init_execution_context(self._graph)
        else:
            self._context = await client.init_execution_context_with_session_id(
                self._graph, self.session_id, persist=self._persist
            )
        if self._system is not None and not self._context.attached:
            await client.reset(self._context, self._system)
        if self._options or self._priority != "normal":
            await client.set_options(self._context, self._options, priority=self._priority)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for branch in tuple(self._branches):
            await branch._close()
        context, graph = self._context, self._graph
        self._context = self._graph = None
        if self._trunk is not None:
            self._trunk._branches.discard(self)
            graph = None
        for turn, _ in self._turns:
            self.client.connection.abandon(turn)
        with anyio.move_on_after(CLOSE_S_MAX, shield=True):
            if context is not None:
                await _ignore_refusal(self.client.finalize_execution_context(context, keep=True))
            if graph is not None:
                await _ignore_refusal(self.client.unload(graph, keep=True))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        raw: bool | None = None,
        options: dict[str, Any] | None = None,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_queue: QueueCallback | None = None,
    ) -> AsyncStream:
        """Stream a turn: *prompt* is the user's text, or messages (role and content), added to the
        history by the chat template; with *raw* it is added as it stands. Without one the history
        is answered as it is. *on_queue* is told the turn's place, where it has to wait.
        """
        params = self.client.turn_params(
            self.context, prompt, self._is_raw(raw), options,
            priority or self._priority, timeout, queue_timeout, watch=on_queue is not None,
        )  # fmt: skip

        async def start(kind: type[K], deadline: float) -> K:
            await self._settle()
            request = kind("stream", deadline)
            await self.client.connection.start(request, params)
            self._took_turn(request)
            return request

        return AsyncStream(self.client.new_turn(start, timeout, self._ended, on_queue))

    def resume(
        self,
        tokens: Sequence[int] = (),
        text: str = "",
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_queue: QueueCallback | None = None,
    ) -> AsyncStream:
        """Go on with the turn that a restart of the daemon, or the end of its connection, has
        interrupted (`attached` sessions whose metadata's stop reason is `detached`). *tokens* and
        *text* are what was read of it: the stream begins after them.
        """
        params = w.ResumeParams(
            context=self.context,
            tokens=list(tokens),
            text=text.encode(),
            priority=priority or "",
            queue_timeout_s=queue_timeout or 0.0,
            timeout_s=self.client.limit_s(timeout),
            watch=on_queue is not None,
        )

        async def start(kind: type[K], deadline: float) -> K:
            await self._settle()
            request = kind("resume", deadline)
            await self.client.connection.start(request, params)
            self._took_turn(request)
            return request

        return AsyncStream(self.client.new_turn(start, timeout, self._ended, on_queue))

    async def chat(
        self,
        prompt: Prompt | None = None,
        *,
        raw: bool | None = None,
        options: dict[str, Any] | None = None,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_queue: QueueCallback | None = None,
    ) -> Reply:
        """Do a turn as `stream` does and return its whole text, with its metadata."""
        params = self.client.turn_params(
            self.context, prompt, self._is_raw(raw), options,
            priority or self._priority, timeout, queue_timeout, watch=on_queue is not None,
        )  # fmt: skip
        await self._settle()
        result = await self.client.call(
            "chat", params, w.TurnResult, timeout,
            on_event=queue_events(on_queue), on_start=self._took_turn,
        )  # fmt: skip
        self.metadata = result.metadata
        return Reply(result.text.decode(errors="replace"), result.metadata)

    def pull(
        self,
        prompt: TensorLike | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> AsyncPull:
        """Compute a turn token by token, each when it is asked for; *prompt* is added to the
        history as it stands. Without one the context's input is computed as `set_input` left it.

        *timeout* bounds each token. `set_options` between two tokens holds from the next one.
        """
        return AsyncPull(self, prompt, priority or self._priority, timeout)

    async def set_options(
        self,
        options: dict[str, Any] | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> None:
        """Let parameters, and a priority, hold for the turns from now on."""
        await self.client.set_options(self.context, options, priority=priority, timeout=timeout)
        self._priority = priority or self._priority

    async def parameters(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return every parameter as it holds now; see `AsyncClient.parameters`."""
        return await self.client.parameters(self.context, timeout=timeout)

    async def reset(self, system: str | None = None, *, timeout: float | None = None) -> None:
        """Empty the history; the system prompt stays, or becomes *system*."""
        await self._settle()
        self._system = self._system if system is None else system
        await self.client.reset(self.context, self._system, timeout=timeout)

    async def fork(
        self, n: int = 1, *, session_ids: Sequence[str] = (), timeout: float | None = None
    ) -> list[AsyncSession]:
        """Return *n* sessions that go on from here, each on its own; all or none.

        They are open, live on this one's lease and are closed with it, or by an `async with` of
        their own. With *session_ids* each has an id by which it can be come back to.
        """
        await self._settle()
        result = await self.client.fork_session(
            self.context, n, session_ids=session_ids, timeout=timeout
        )
        ids: Sequence[str | None] = session_ids or [None] * n
        return [self._branch(*pair) for pair in zip(result.contexts, ids, strict=True)]

    def _branch(self, context: int, session_id: str | None) -> AsyncSession:
        branch = AsyncSession(
            self.client,
            self.model,
            system=self._system,
            session_id=session_id,
            raw=self._raw,
            priority=self._priority,
        )
        branch._trunk, branch._graph, branch._appends = self, self._graph, self._appends
        branch._context = Context.of(w.ContextResult(context=context))
        self._branches.add(branch)
        return branch

    async def rewind(
        self,
        turns: int | None = None,
        *,
        tokens: int | None = None,
        timeout: float | None = None,
    ) -> w.RewindResult:
        """Go back by *turns*, questions and answers both, or to the first *tokens* tokens."""
        await self._settle()
        return await self.client.rewind(self.context, turns=turns, tokens=tokens, timeout=timeout)

    async def forget(self, *, timeout: float | None = None) -> None:
        """Delete the session with all that the daemon keeps of it; it is closed then."""
        await self._settle()
        await self.client.forget(self.context, timeout=timeout)
        self._context = None

    async def cancel(self, *, timeout: float | None = None) -> bool:
        """Cancel the turn under way, whoever reads it; tell whether there was one."""
        return await self.client.cancel(self.context, timeout=timeout)

    # What streams and pulls do with the session.

    async def begin_pull(self, prompt: TensorLike | None, timeout: float | None) -> PullTurn:
        """Set the input of a pull."""
        await self._settle()
        if prompt is not None and not self._appends:
            await self.client.set_input(self.context, 1, _APPEND, timeout=timeout)
            self._appends = True
        if prompt is not None:
            await self.client.set_input(self.context, 0, prompt, timeout=timeout)
        self._pull = PullTurn(self.client.connection, self.context, _caller())
        return self._pull

    def _took_turn(self, request: InFlight) -> None:
        # More than one only until the daemon has refused the others as `SessionBusy`.
        self._turns = [turn for turn in self._turns if not turn[0].answered]
        self._turns.append((request, _caller()))

    def _ended(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata

    def _is_raw(self, raw: bool | None) -> bool:
        return self._raw if raw is None else raw

    async def _settle(self) -> None:
        """See to the turn before: one that was left is ended, and its end awaited.

        A turn that another task reads goes on; the daemon then answers `SessionBusy`.
        """
        pull, caller = self._pull, _caller()
        if pull is not None and not pull.ended and (pull.left or pull.caller == caller):
            pull.ended = True
            await self.client.fini_single(pull.context)
        for turn, turn_caller in self._turns:
            if turn.abandoned or turn_caller == caller:
                self.client.connection.abandon(turn)
                with anyio.move_on_after(SETTLE_S_MAX):
                    await turn.wait_answered()


def _opened(handle: Handle | None) -> Handle:
    if handle is None:
        raise InvalidArgument(
            "the session is not open", hint="use it as `with client.session(…) as session:`"
        )
    return handle


async def _ignore_refusal(call: Awaitable[None]) -> None:
    """Await a call that tidies up: what is closed or lost already needs no closing."""
    try:
        await call
    except (InvalidArgument, SessionExpired, ConnectionLost, ShuttingDown):
        return

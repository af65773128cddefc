"""The natural client's conversation: a lease on a model, a context on it, and its turns."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from ....backends.errors import InferdError, InvalidArgument, SessionExpired
from ... import messages as w
from ...handles import Context, Graph
from ...payloads import Config, Priority, Prompt, TensorLike
from ...traceparent import traceparent_of
from ..connection.inflight import InFlight
from ..streams.answers import Answer, ContextsCallback, ask
from ..streams.pull import AsyncPull, PullTurn
from ..streams.streams import SETTLE_S_MAX, AsyncStream, QueueCallback, queue_events
from ..streams.texts import Reply, reply_of
from ..wasi_calls import ProgressCallback
from .attaching import Attachment
from .resuming import Asked, is_loss, told_so_far

if TYPE_CHECKING:
    from ..client import AsyncClient

__all__ = ("AsyncSession", "calling_thread")

Handle = TypeVar("Handle", bound=int)
_APPEND = b'{"append":true}'

calling_thread: ContextVar[int] = ContextVar("calling_thread", default=0)
"""The thread that a call of the synchronous client comes from; 0 in tasks of the user's own."""


def _caller() -> int:
    return calling_thread.get() or anyio.get_current_task().id


class AsyncSession:
    """A conversation with a model; `AsyncClient.session` makes it. One turn at a time.

    Opened and closed by `async with`: it loads the model if need be and leaves nothing behind, also
    where opening fails. A turn whose stream was left early is cancelled by the next call of the
    same task; a turn that another task reads makes it `SessionBusy`.

    One that *resumes* attaches again by its id where the connection is lost, and its streams and
    chats go on; others raise `ConnectionLost` or `ShuttingDown`, with what was read in `data`.
    """

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        *,
        system: str | None = None,
        session_id: str | None = None,
        persist: bool = True,
        resume: bool = False,
        raw: bool = False,
        priority: Priority = "normal",
        options: dict[str, Any] | None = None,
        config: Config | None = None,
        on_progress: ProgressCallback | None = None,
    ):
        if resume and session_id is None:
            raise InvalidArgument(
                "resume without a session_id", hint="give the session an id to be found again by"
            )
        self.client = client
        self.model = model
        self.session_id = session_id
        self.resumes = resume
        self.metadata: dict[str, Any] = {}
        self.attachment = Attachment(
            client, model, session_id, persist=persist, config=config, on_progress=on_progress
        )
        self._system, self._raw, self._priority = system, raw, priority
        self._options = options
        self._spoke = False
        """There is a history that must be there again after a restart."""
        self._turns: list[tuple[InFlight, int]] = []
        self._pull: PullTurn | None = None
        self._appends = False
        self._trunk: AsyncSession | None = None
        """Where this one branched off: the lease on the model is that session's."""
        self._branches: set[AsyncSession] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self.model} [context {self.attachment.context}]>"

    @property
    def graph(self) -> Graph:
        """The session's lease on the model, and what the daemon said of it."""
        return _opened(self.attachment.graph)

    @property
    def context(self) -> Context:
        """The execution context's handle, for the wasi-nn calls.

        :raises ConnectionLost: its connection is gone, and the session does not resume.
        """
        context, connection = _opened(self.attachment.context), self.attachment.connection
        if connection is not None and connection.lost and not self.resumes:
            connection.raise_if_lost()
        return context

    @property
    def attached(self) -> bool:
        """Whether the session was there before, with its history."""
        return _opened(self.attachment.context).attached

    async def __aenter__(self) -> Self:
        if self._trunk is not None and self.attachment.context is not None:
            return self
        if self.attachment.graph is not None:
            raise InvalidArgument("the session is open already", hint="make another one")
        try:
            await self._open()
        except BaseException:
            await self._close()
            raise
        return self

    async def _open(self) -> None:
        if self.resumes:
            await self.client.reconnect()
        try:
            await self._begin(await self.attachment.open())
        except InferdError as exc:
            former = self.attachment.connection
            if former is None or not self.resumes or not is_loss(exc):
                raise
            await self.attachment.close()
            until = time.monotonic() + self.client.resume_timeout
            await self.attachment.renew(former, until)
            await self._begin(self.context)

    async def _begin(self, context: Context) -> None:
        """Give a context that is newly attached to its system prompt and its options."""
        self._spoke = context.attached
        if self._system is not None and not context.attached:
            await self.client.reset(context, self._system)
            self._spoke = True
        if self._options or self._priority != "normal":
            await self.client.set_options(context, self._options, priority=self._priority)

    async def attach_again(self, until: float) -> None:
        """Attach to the session over another connection, once the present one has ended; try
        *until* then.

        :raises SessionExpired: the daemon does not have it any more.
        """
        former = self.attachment.connection
        assert former is not None, "a session that was never open is not attached again"
        await self.attachment.renew(former, until)
        await self._come_back()

    async def wake(self) -> None:
        """Open the context again that was idle for too long, over the same connection."""
        await self.attachment.close()
        await self.attachment.open()
        await self._come_back()

    async def _come_back(self) -> None:
        if self.attached:
            return
        if self._spoke:
            await self.attachment.close()
            raise SessionExpired(
                f"the daemon does not have session {self.session_id!r} any more",
                hint="open it anew: it begins without a history; `inferd status` may tell why",
            )
        await self._begin(self.context)

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
        if self._trunk is not None:
            self._trunk._branches.discard(self)
        for turn, _ in self._turns:
            turn.connection.abandon_request(turn)
        await self.attachment.close()

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
        traceparent: str | None = None,
    ) -> AsyncStream:
        """Stream a turn: *prompt* is the user's text, or messages (role and content), added to the
        history by the chat template; with *raw* it is added as it stands. Without one the history
        is answered as it is. *on_queue* is told the turn's place, where it has to wait.

        *traceparent* is the span that the turn is for (W3C Trace Context); without it that which is
        current in OpenTelemetry, where the program has that.
        """
        fields = self.client.turn_fields(
            prompt, self._is_raw(raw), options, priority or self._priority, timeout,
            queue_timeout, traceparent,
        )  # fmt: skip
        context = _opened(self.attachment.context)
        params = w.StreamParams(context=context, watch=on_queue is not None, **fields)
        return self._stream(params, timeout, on_queue)

    def _stream(
        self,
        params: w.StreamParams | w.ResumeParams,
        timeout: float | None,
        on_queue: QueueCallback | None,
    ) -> AsyncStream:
        asked = Asked(self, params)
        go_on = asked.go_on if self.resumes else None
        return AsyncStream(self.client.new_turn(asked.start, timeout, self._ended, on_queue, go_on))

    def resume(
        self,
        tokens: Sequence[int] = (),
        text: str = "",
        *,
        reasoning: str = "",
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_queue: QueueCallback | None = None,
        traceparent: str | None = None,
    ) -> AsyncStream:
        """Go on with the turn that a restart of the daemon, or the end of its connection, has
        interrupted (`attached` sessions whose metadata's stop reason is `detached`). *tokens*,
        *text* and *reasoning* are what was read of it: the stream begins after them.
        """
        params = w.ResumeParams(
            context=_opened(self.attachment.context),
            tokens=list(tokens),
            text=text.encode(),
            reasoning=reasoning.encode(),
            priority=priority or "",
            queue_timeout_s=queue_timeout or 0.0,
            timeout_s=self.client.limit_s(timeout),
            traceparent=traceparent_of(traceparent),
            watch=on_queue is not None,
        )
        return self._stream(params, timeout, on_queue)

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
        traceparent: str | None = None,
    ) -> Reply:
        """Do a turn as `stream` does and return its whole text, with its metadata."""
        if self.resumes:  # what was told is needed to go on from there
            stream = self.stream(
                prompt, raw=raw, options=options, priority=priority, timeout=timeout,
                queue_timeout=queue_timeout, on_queue=on_queue, traceparent=traceparent,
            )  # fmt: skip
            async with stream:
                text = "".join([piece async for piece in stream])
            return Reply(text, stream.metadata, stream.reasoning)
        fields = self.client.turn_fields(
            prompt, self._is_raw(raw), options, priority or self._priority, timeout,
            queue_timeout, traceparent,
        )  # fmt: skip
        params = w.StreamParams(context=self.context, watch=on_queue is not None, **fields)
        await self.settle()
        try:
            result = await self.client.call(
                "chat", params, w.TurnResult, timeout,
                on_event=queue_events(on_queue), on_start=self.took_turn,
            )  # fmt: skip
        except InferdError as exc:
            raise told_so_far(exc, [], "") if is_loss(exc) else exc from None
        self.metadata = result.metadata
        return reply_of(result)

    async def answers(
        self,
        prompt: Prompt | None = None,
        n: int = 2,
        *,
        raw: bool | None = None,
        options: dict[str, Any] | None = None,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_contexts: ContextsCallback | None = None,
        traceparent: str | None = None,
    ) -> list[Answer]:
        """Return *n* answers to one prompt, which is computed once, each with a seed of its own;
        one that failed has its `error`. The conversation goes on from the first one. A turn of each
        can be cancelled by its context, of which *on_contexts* hears.
        """
        await self.settle()
        fields = self.client.turn_fields(
            prompt, self._is_raw(raw), options, priority or self._priority, timeout,
            queue_timeout, traceparent,
        )  # fmt: skip
        found = await ask(self, n, fields, timeout, on_contexts)
        self.metadata = found[0].metadata
        return found

    def pull(
        self,
        prompt: TensorLike | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncPull:
        """Compute a turn token by token, each when it is asked for; *prompt* is added to the
        history as it stands. Without one the context's input is computed as `set_input` left it.

        *timeout* bounds each token. `set_options` between two tokens holds from the next one.
        """
        return AsyncPull(self, prompt, priority or self._priority, timeout, traceparent)

    async def set_options(
        self,
        options: dict[str, Any] | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> None:
        """Let parameters, and a priority, hold for the turns from now on."""
        await self._attached()
        await self.client.set_options(self.context, options, priority=priority, timeout=timeout)
        self._priority = priority or self._priority

    async def parameters(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return every parameter as it holds now; see `AsyncClient.parameters`."""
        return await self.client.parameters(self.context, timeout=timeout)

    async def reset(self, system: str | None = None, *, timeout: float | None = None) -> None:
        """Empty the history; the system prompt stays, or becomes *system*."""
        await self.settle()
        self._system = self._system if system is None else system
        await self.client.reset(self.context, self._system, timeout=timeout)

    async def fork(
        self, n: int = 1, *, session_ids: Sequence[str] = (), timeout: float | None = None
    ) -> list[AsyncSession]:
        """Return *n* sessions that go on from here, each on its own; all or none.

        They are open, live on this one's lease and are closed with it, or by an `async with` of
        their own. With *session_ids* each has an id by which it can be come back to.
        """
        await self.settle()
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
            resume=self.resumes and session_id is not None,
            raw=self._raw,
            priority=self._priority,
        )
        branch._trunk, branch._appends, branch._spoke = self, self._appends, True
        handle = Context.of(w.ContextResult(context=context))
        branch.attachment = self.attachment.branch(handle, session_id)
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
        await self.settle()
        return await self.client.rewind(self.context, turns=turns, tokens=tokens, timeout=timeout)

    async def forget(self, *, timeout: float | None = None) -> None:
        """Delete the session with all that the daemon keeps of it; it is closed then."""
        await self.settle()
        await self.client.forget(self.context, timeout=timeout)
        self.attachment.context = None

    async def cancel(self, *, timeout: float | None = None) -> bool:
        """Cancel the turn under way, whoever reads it; tell whether there was one."""
        return await self.client.cancel(self.context, timeout=timeout)

    # What streams and pulls do with the session.

    async def begin_pull(self, prompt: TensorLike | None, timeout: float | None) -> PullTurn:
        """Set the input of a pull."""
        await self.settle()
        if prompt is not None and not self._appends:
            await self.client.set_input(self.context, 1, _APPEND, timeout=timeout)
            self._appends = True
        if prompt is not None:
            await self.client.set_input(self.context, 0, prompt, timeout=timeout)
        self._pull = PullTurn(self.client.connection, self.context, _caller())
        return self._pull

    def took_turn(self, request: InFlight) -> None:
        """Note the request of a turn that has begun."""
        self._spoke = True
        # More than one only until the daemon has refused the others as `SessionBusy`.
        self._turns = [turn for turn in self._turns if not turn[0].answered]
        self._turns.append((request, _caller()))

    def _ended(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata

    def _is_raw(self, raw: bool | None) -> bool:
        return self._raw if raw is None else raw

    async def _attached(self, until: float = math.inf) -> None:
        """Attach again, where the connection was lost since and the session resumes."""
        if self.resumes and self.attachment.lost:
            await self.attach_again(min(until, time.monotonic() + self.client.resume_timeout))

    async def settle(self, until: float = math.inf) -> None:
        """See to the turn before: one that was left is ended, and its end awaited.

        A turn that another task reads goes on; the daemon then answers `SessionBusy`.
        """
        await self._attached(until)
        pull, caller = self._pull, _caller()
        if pull is not None and not pull.ended and (pull.left or pull.caller == caller):
            pull.ended = True
            if not pull.connection.lost:
                await self.client.fini_single(pull.context)
        for turn, turn_caller in self._turns:
            if turn.abandoned or turn_caller == caller:
                turn.connection.abandon_request(turn)
                with anyio.move_on_after(SETTLE_S_MAX):
                    await turn.wait_answered()


def _opened(handle: Handle | None) -> Handle:
    if handle is None:
        raise InvalidArgument(
            "the session is not open", hint="use it as `with client.session(…) as session:`"
        )
    return handle

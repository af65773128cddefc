"""A conversation with a model at the client's end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ....backends.errors import InferdError, InvalidArgument
from ... import messages as w
from ...handles import Context, Graph
from ...payloads import Priority, Prompt, TensorLike
from ..losses import is_loss, with_progress
from ..operations import AsyncOperations
from ..streams.answers import Answer, ContextsCallback, answers_of, context_events
from ..streams.async_stream import AsyncStream
from ..streams.texts import Reply, reply_of
from ..streams.turn import StreamedTurn
from ..turn_settings import QueueCallback, TurnSettings, queue_events
from .attachment import Attachment, require_open
from .pull import AsyncPull
from .session_settings import SessionSettings
from .turn_request import TurnRequest
from .turns_under_way import TurnsUnderWay


class AsyncSession:
    """A conversation with a model; `AsyncClient.session` makes it. One turn at a time.

    Opened and closed by `async with`: it loads the model if need be and leaves nothing behind, also
    where opening fails. A turn whose stream was left early is cancelled by the next call of the
    same task; a turn that another task reads makes it `SessionBusy`.

    One that resumes attaches again by its id where the connection is lost, and its streams and
    chats go on; others raise `ConnectionLost` or `ShuttingDown`, with the part that was read in
    `data`.
    """

    def __init__(
        self,
        client: AsyncOperations,
        settings: SessionSettings,
        attachment: Attachment | None = None,
        trunk: AsyncSession | None = None,
    ):
        self.client, self._settings = client, settings
        self._attachment = attachment or Attachment(client, settings)
        self._trunk = trunk
        """The session that this one branched off, which has the lease on the model."""
        self._branches: set[AsyncSession] = set()
        appends = trunk is not None and trunk._turns.appends
        self._turns: TurnsUnderWay = TurnsUnderWay(client, self._attachment, appends=appends)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self.model} [context {self._attachment.context}]>"

    @property
    def model(self) -> str:
        """The model's name."""
        return self._settings.model

    @property
    def session_id(self) -> str | None:
        """The session's id, if it has one."""
        return self._settings.session_id

    @property
    def graph(self) -> Graph:
        """The session's lease on the model, with the daemon's description of it."""
        return require_open(self._attachment.graph)

    @property
    def context(self) -> Context:
        """The execution context's handle, for the wasi-nn calls.

        :raises ConnectionLost: its connection was lost, and the session does not resume.
        """
        return self._attachment.live_context

    @property
    def attached(self) -> bool:
        """Whether the session was there before, with its history."""
        return require_open(self._attachment.context).attached

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the last turn that ended."""
        return self._turns.metadata

    async def __aenter__(self) -> Self:
        if self._trunk is not None and self._attachment.context is not None:
            return self
        if self._attachment.graph is not None:
            raise InvalidArgument("the session is open already", hint="make another one")
        try:
            await self._attachment.open()
        except BaseException:
            await self._close()
            raise
        return self

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
        self._turns.abandon_streams()
        await self._attachment.close()

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
        is answered as it is. *on_queue* is called with the turn's place in the queue,
        where it has to wait.

        *traceparent* is the span that the turn is for (W3C Trace Context); without it that which is
        current in OpenTelemetry, where the program has that.
        """
        settings = TurnSettings(
            raw=self._settings.raw if raw is None else raw,
            options=options,
            priority=priority or self._settings.priority,
            timeout_s=self.client.seconds(timeout),
            queue_timeout_s=queue_timeout,
            on_queue=on_queue,
            traceparent=traceparent,
        )
        context = require_open(self._attachment.context)
        return self._stream(settings.stream_params(context, prompt), settings)

    def _stream(
        self, params: w.StreamParams | w.ResumeParams, settings: TurnSettings
    ) -> AsyncStream:
        request = TurnRequest(self._turns, params)
        turn = StreamedTurn(
            request.send,
            timeout_s=settings.timeout_s,
            retries=self.client.retries,
            on_end=self._turns.set_metadata,
            on_queue=settings.on_queue,
            recovery=request.recover if self._settings.resume else None,
        )
        return AsyncStream(turn)

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
        settings = TurnSettings(
            priority=priority,
            timeout_s=self.client.seconds(timeout),
            queue_timeout_s=queue_timeout,
            on_queue=on_queue,
            traceparent=traceparent,
        )
        context = require_open(self._attachment.context)
        return self._stream(settings.resume_params(context, tokens, text, reasoning), settings)

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
        settings = TurnSettings(
            raw=self._settings.raw if raw is None else raw,
            options=options,
            priority=priority or self._settings.priority,
            timeout_s=self.client.seconds(timeout),
            queue_timeout_s=queue_timeout,
            on_queue=on_queue,
            traceparent=traceparent,
        )
        if self._settings.resume:  # the text that was read is needed to go on after it
            params = settings.stream_params(require_open(self._attachment.context), prompt)
            async with self._stream(params, settings) as stream:
                text = "".join([piece async for piece in stream])
            return Reply(text, stream.metadata, stream.reasoning)
        params = settings.stream_params(self.context, prompt)
        await self._turns.end_previous()
        try:
            result = await self.client.call(
                "chat", params, w.TurnResult, settings.timeout_s,
                on_event=queue_events(on_queue), on_start=self._turns.add_request,
            )  # fmt: skip
        except InferdError as exc:
            raise with_progress(exc, [], "") if is_loss(exc) else exc from None
        self._turns.set_metadata(result.metadata)
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
        can be cancelled by its context; *on_contexts* is called with the contexts.
        """
        settings = TurnSettings(
            raw=self._settings.raw if raw is None else raw,
            options=options,
            priority=priority or self._settings.priority,
            timeout_s=self.client.seconds(timeout),
            queue_timeout_s=queue_timeout,
            traceparent=traceparent,
        )
        await self._turns.end_previous()
        params = settings.answers_params(self.context, prompt, n)
        result = await self.client.call(
            "answers", params, w.AnswersResult, settings.timeout_s,
            on_event=context_events(on_contexts), on_start=self._turns.add_request,
        )  # fmt: skip
        found = answers_of(result)
        self._turns.set_metadata(found[0].metadata)
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
        settings = TurnSettings(
            priority=priority or self._settings.priority,
            timeout_s=self.client.seconds(timeout),
            traceparent=traceparent,
        )
        return AsyncPull(self._turns, prompt, settings)

    async def set_options(
        self,
        options: dict[str, Any] | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
    ) -> None:
        """Let parameters, and a priority, hold for the turns from now on."""
        await self._attachment.ensure_connected()
        await self.client.set_options(self.context, options, priority=priority, timeout=timeout)
        self._settings.priority = priority or self._settings.priority

    async def parameters(self, *, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return every parameter as it holds now; see `AsyncClient.parameters`."""
        return await self.client.parameters(self.context, timeout=timeout)

    async def reset(self, system: str | None = None, *, timeout: float | None = None) -> None:
        """Empty the history; the system prompt stays, or becomes *system*."""
        await self._turns.end_previous()
        if system is not None:
            self._settings.system = system
        await self.client.reset(self.context, self._settings.system, timeout=timeout)

    async def fork(
        self, n: int = 1, *, session_ids: Sequence[str] = (), timeout: float | None = None
    ) -> list[AsyncSession]:
        """Return *n* sessions that go on from here, each on its own; all or none.

        They are open, live on this one's lease and are closed with it, or by an `async with` of
        their own. With *session_ids* each has an id by which it can be come back to.
        """
        await self._turns.end_previous()
        result = await self.client.fork_session(
            self.context, n, session_ids=session_ids, timeout=timeout
        )
        ids: Sequence[str | None] = session_ids or [None] * n
        return [self._branch(*pair) for pair in zip(result.contexts, ids, strict=True)]

    def _branch(self, context: int, session_id: str | None) -> AsyncSession:
        settings = replace(
            self._settings,
            session_id=session_id,
            resume=self._settings.resume and session_id is not None,
            options=None,
            on_progress=None,
        )
        handle = Context.from_result(w.ContextResult(context=context))
        attachment = self._attachment.branch(handle, settings)
        branch = AsyncSession(self.client, settings, attachment, trunk=self)
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
        await self._turns.end_previous()
        return await self.client.rewind(self.context, turns=turns, tokens=tokens, timeout=timeout)

    async def forget(self, *, timeout: float | None = None) -> None:
        """Delete the session with all that the daemon keeps of it; it is closed then."""
        await self._turns.end_previous()
        await self.client.forget(self.context, timeout=timeout)
        self._attachment.context = None

    async def cancel(self, *, timeout: float | None = None) -> bool:
        """Cancel the turn under way, in any task; return whether there was one."""
        return await self.client.cancel(self.context, timeout=timeout)

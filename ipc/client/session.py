"""A conversation with a model, at the client's end."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, Unpack, cast, overload
from warnings import warn

import msgspec

from ...backends.errors import ContextFull, EndOfSequence, InferdError, InvalidArgument
from .. import messages as w
from ..handles import Context, Graph
from ..names import Priority
from ..payloads import Prompt, TensorLike, traceparent_of
from .attachment import Attachment, ClientSessionSettings, PulledTurn, TurnsUnderWay, require_open
from .caller import as_event, is_loss, with_progress
from .connection.core import no_metadata
from .operations import AsyncOperations
from .parameters import Options, Parameters
from .results import Metadata, ParameterInfo
from .streams import AsyncStream, StreamedTurn
from .texts import Answer, Reply, answers_of, reply_of
from .tool_rounds import ROUNDS_MAX, ToolRounds, compute_chat
from .turn_request import TurnRequest
from .turn_settings import (
    PromptCallback,
    QueueCallback,
    SchedulingKeywords,
    StartCallback,
    TurnKeywords,
    TurnSettings,
    read_settings,
    takes,
)


class AsyncPull(AsyncIterator[str], AbstractAsyncContextManager["AsyncPull"]):
    """The pieces of a turn, each computed on demand (`compute_single`).

    A turn that is not read to its end is cancelled as in `AsyncStream`; the history keeps the
    pieces that were read. A piece is empty while a character's bytes, or a possible stop text, are
    incomplete.
    """

    def __init__(
        self,
        turns: TurnsUnderWay,
        prompt: TensorLike | None,
        settings: TurnSettings,
        session: object,
    ):
        self._session = session  # kept open, as for streams
        self.metadata = no_metadata()
        self._turns, self._prompt, self._settings = turns, prompt, settings
        self._traceparent = traceparent_of(settings.traceparent)
        self._turn: PulledTurn | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def __anext__(self) -> str:
        turn = self._turn
        if turn is None:
            turn = self._turn = await self._turns.start_pull(self._prompt, self._settings.timeout)
        if turn.ended:
            raise StopAsyncIteration
        try:
            piece = await self._turns.client.compute_single(
                turn.context,
                priority=self._settings.priority,
                timeout=self._settings.timeout,
                traceparent=self._traceparent,
            )
        except (EndOfSequence, ContextFull):
            turn.ended = True
        except BaseException:
            turn.abandon()
            raise
        else:
            return self._decoder.decode(piece)
        client, timeout = self._turns.client, self._settings.timeout
        text = await client.get_output(turn.context, 1, timeout=timeout)
        self.metadata = cast("Metadata", msgspec.json.decode(text))
        self._turns.set_metadata(self.metadata)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the turn if it has not ended."""
        turn = self._turn
        if turn is not None and not turn.ended:
            turn.ended = True
            await self._turns.client.fini_single(turn.context)

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _abandon(self) -> None:
        """End the turn soon if it has not ended, without waiting."""
        turn = self._turn
        if turn is not None and not turn.ended and not turn.abandoned:
            turn.abandon()

    def __del__(self) -> None:
        self._abandon()


T = TypeVar("T")


class SessionProperties:
    """The properties that a session and its synchronous wrapper share."""

    _turns: TurnsUnderWay

    @property
    def model(self) -> str:
        """The model's name."""
        return self._turns.attachment.settings.model

    @property
    def session_id(self) -> str | None:
        """The session's id, if it has one."""
        return self._turns.attachment.settings.session_id

    @property
    def graph(self) -> Graph:
        """The session's lease on the model, with the model's properties."""
        return require_open(self._turns.attachment.graph)

    @property
    def context(self) -> Context:
        """The execution context's handle, for the wasi-nn calls.

        :raises ConnectionLost: its connection was lost, and the session does not resume.
        """
        return self._turns.attachment.live_context

    @property
    def attached(self) -> bool:
        """Whether the session existed before it was opened here, with its history."""
        return require_open(self._turns.attachment.context).attached

    @property
    def metadata(self) -> Metadata:
        """The metadata of the last turn that ended."""
        return self._turns.metadata


class AsyncSession(SessionProperties):
    """A conversation with a model, made by `AsyncClient.session`. It has one turn at a time.

    `async with` opens it, loading the model if necessary, and closes it, even if opening fails;
    `open` and `aclose` do so without a block. The same task's next call cancels a turn whose stream
    was left early. While another task reads a turn, calls raise `SessionBusy`.

    A session with `resume` attaches again by its id after its connection was lost, and its streams
    and chats continue. Other sessions raise `ConnectionLost` or `ShuttingDown`, with the part that
    was read in `data`.
    """

    def __init__(
        self,
        client: AsyncOperations,
        settings: ClientSessionSettings,
        attachment: Attachment | None = None,
        trunk: AsyncSession | None = None,
    ):
        self._client, self._settings = client, settings
        self._attachment = attachment or Attachment(client, settings)
        self._trunk = trunk
        """The session that this branch was forked from; it has the lease on the model."""
        self._branches: set[AsyncSession] = set()
        self._opening = False
        appends = trunk is not None and trunk._turns.appends
        self._turns = TurnsUnderWay(client, self._attachment, appends=appends)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self.model} [context {self._attachment.context}]>"

    async def open(self) -> Self:
        """Open the session, unless it is open; without `async with`, `aclose` it."""
        if self._attachment.context is None:
            await self._open()
        return self

    async def _open(self) -> None:
        if self._opening:
            raise InvalidArgument(
                "the session is being opened", hint="open it in one task, before others use it"
            )
        self._opening = True
        try:
            await self._attachment.open()
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._opening = False

    async def __aenter__(self) -> Self:
        if self._trunk is not None and self._attachment.context is not None:
            return self
        if self._attachment.graph is not None:
            raise InvalidArgument("the session is already open", hint="make another session")
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        attachment: Attachment | None = getattr(self, "_attachment", None)
        if attachment is None or attachment.context is None or self._trunk is not None:
            return
        name = repr(self)
        if attachment.close_unused():
            text = f"unclosed {name}: use `async with` (`with` for `Client`), or close it"
            warn(text, ResourceWarning, stacklevel=2, source=self)

    async def aclose(self) -> None:
        """Cancel its turn and close the session, with its branches; a second call does nothing. A
        session with an id can be opened again.
        """
        for branch in tuple(self._branches):
            await branch.aclose()
        if self._trunk is not None:
            self._trunk._branches.discard(self)
        self._turns.abandon_streams()
        await self._attachment.close()

    @takes(TurnKeywords)
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        on_queue: QueueCallback | None = None,
        on_prompt: PromptCallback | None = None,
        on_start: StartCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> AsyncStream:
        """Stream a turn that answers *prompt*, or without a prompt the present history.

        The chat template adds *prompt* to the history: the user's text, texts with images and
        sounds in a list, or messages with role and content. With *raw* a text is added unchanged.
        *on_queue* is called with the turn's place in the queue while it waits, *on_start* when it
        gets a slot, and *on_prompt* with its prompt's progress: a map of `total`, `cache`,
        `processed` and `time_ms`. *traceparent* is the turn's parent span (W3C Trace Context); the
        default is OpenTelemetry's current span, if the program uses OpenTelemetry.
        """
        settings = self._turn_settings(keywords, on_queue, on_prompt, on_start)
        context = require_open(self._attachment.context)
        return self._stream(settings.stream_params(context, prompt), settings)

    def _turn_settings(
        self,
        keywords: TurnKeywords,
        on_queue: QueueCallback | None = None,
        on_prompt: PromptCallback | None = None,
        on_start: StartCallback | None = None,
    ) -> TurnSettings:
        """Return a turn's settings, with the session's defaults."""
        if keywords.get("raw") is None:
            keywords["raw"] = self._settings.raw
        keywords["priority"] = keywords.get("priority") or self._settings.priority
        timeout_s = self._client._seconds(None)
        return read_settings(timeout_s, keywords, on_queue, on_prompt, on_start)

    def _stream(
        self, params: w.StreamParams | w.ResumeParams, settings: TurnSettings
    ) -> AsyncStream:
        request = TurnRequest(self._turns, params, self)
        turn = StreamedTurn(
            request.send,
            self._client._driver,
            timeout_s=settings.timeout_s,
            retries=self._client._retries,
            on_queue=settings.on_queue,
            on_prompt=settings.on_prompt,
            on_start=settings.on_start,
            recovery=request.recover if self._settings.resume else None,
        )
        return AsyncStream(turn)

    @takes(SchedulingKeywords)
    def resume(
        self,
        tokens: Sequence[int] = (),
        text: str = "",
        *,
        reasoning: str = "",
        raw_text: str = "",
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> AsyncStream:
        """Continue the turn that a restart of the daemon or a lost connection has interrupted.

        If the turn has ended since, the stream has the rest of its text and its metadata. *tokens*,
        *text* and *reasoning* are the part already read; the stream begins after them. For a turn
        with `tools`, *raw_text* replaces text and reasoning.
        """
        timeout_s = self._client._seconds(None)
        settings = read_settings(timeout_s, keywords, on_queue, taken=SchedulingKeywords)
        context = require_open(self._attachment.context)
        params = settings.resume_params(context, tokens, text, reasoning, raw_text)
        return self._stream(params, settings)

    @overload
    async def chat(
        self,
        prompt: Prompt | None = None,
        *,
        schema: type[T],
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> T: ...

    @overload
    async def chat(
        self,
        prompt: Prompt | None = None,
        *,
        schema: None = None,
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> Reply: ...

    @takes(TurnKeywords)
    async def chat(
        self,
        prompt: Prompt | None = None,
        *,
        schema: type | None = None,
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> Any:
        """Compute a turn as `stream` does, and return its whole text with its metadata.

        With *schema*, a struct of msgspec, a dataclass or a pydantic model, the answer is JSON that
        fits it, and is returned as an instance; else `InvalidAnswer` is raised.

        Functions among the *tools* are called when the model calls them, and it gets their results
        in the next turn, for at most *tool_rounds_max* rounds; then it must answer in text. A
        function's name, docstring and types describe it to the model. Exceptions, wrong arguments
        and unknown names are returned to the model as errors. A function without `async` runs in
        another thread, with the synchronous client in the calling one. If the model calls one of
        the *tools* that is a definition instead, the reply is returned for the program to answer.
        """
        seconds = self._client._seconds(keywords.get("timeout"))
        rounds = ToolRounds(self._client._driver, tool_rounds_max, seconds)
        turn = partial(self._chat, on_queue=on_queue)
        return await compute_chat(turn, prompt, keywords, schema, rounds)

    async def _chat(
        self, prompt: Prompt | None, keywords: TurnKeywords, *, on_queue: QueueCallback | None
    ) -> Reply:
        settings = self._turn_settings(keywords.copy(), on_queue)
        if self._settings.resume:  # continuing after a loss needs the text that was read
            params = settings.stream_params(require_open(self._attachment.context), prompt)
            async with self._stream(params, settings) as stream:
                text = "".join([piece async for piece in stream])
            return Reply(text, stream.metadata, stream.reasoning, stream.tool_calls)
        params = settings.stream_params(self.context, prompt)
        await self._turns.end_previous()
        try:
            result = await self._client._call(
                "chat", params, w.TurnResult, settings.timeout,
                on_event=on_queue and (lambda event: on_queue(as_event(event, w.QueueEvent))),
                on_start=self._turns.add_request,
            )  # fmt: skip
        except InferdError as exc:
            raise with_progress(exc, [], "") if is_loss(exc) else exc from None
        return reply_of(result)

    @takes(TurnKeywords)
    async def answers(
        self,
        prompt: Prompt | None = None,
        n: int = 2,
        *,
        on_contexts: Callable[[list[int]], None] | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> list[Answer]:
        """Return *n* answers to one prompt, which is computed once; each has a different seed.

        An answer that failed has its `error`. The conversation continues from the first answer.
        When the first has begun, *on_contexts* is called with the answers' contexts, in order, by
        which each turn can be cancelled.
        """
        settings = self._turn_settings(keywords)
        await self._turns.end_previous()
        params = settings.answers_params(self.context, prompt, n)
        result = await self._client._call(
            "answers", params, w.AnswersResult, settings.timeout,
            on_event=on_contexts
            and (lambda event: on_contexts(as_event(event, w.AnswersEvent).contexts)),
            on_start=self._turns.add_request,
        )  # fmt: skip
        answers = answers_of(result)
        self._turns.set_metadata(answers[0].metadata)
        return answers

    def pull(
        self,
        prompt: TensorLike | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncPull:
        """Compute a turn token by token, each on demand.

        *prompt* is added to the history unchanged; the default is the input that `set_input` set.
        *timeout* bounds each token. `set_options` between two tokens applies from the next one.
        """
        settings = self._turn_settings(
            {"priority": priority, "timeout": timeout, "traceparent": traceparent}
        )
        return AsyncPull(self._turns, prompt, settings, self)

    async def set_options(
        self,
        options: Options | dict[str, Any] | None = None,
        *,
        priority: Priority | None = None,
        note: bytes | None = None,
        timeout: float | None = None,
        **parameters: Unpack[Parameters],
    ) -> None:
        """Set parameters and a priority for the next turns, and the *note* that `history` returns;
        see `AsyncClient.set_options`.
        """
        await self._attachment.ensure_connected()
        await self._client.set_options(
            self.context, options, priority=priority, note=note, timeout=timeout, **parameters
        )
        self._settings.priority = priority or self._settings.priority

    async def parameters(self, *, timeout: float | None = None) -> list[ParameterInfo]:
        """Return every parameter in force; see `AsyncClient.parameters`."""
        await self._attachment.ensure_connected()
        return await self._client.parameters(self.context, timeout=timeout)

    async def reset(self, system: str | None = None, *, timeout: float | None = None) -> None:
        """Clear the history; the system prompt stays, or becomes *system*."""
        await self._turns.end_previous()
        if system is not None:
            self._settings.system = system
        await self._client.reset(self.context, self._settings.system, timeout=timeout)

    async def fork(
        self, n: int = 1, *, session_ids: Sequence[str] = (), timeout: float | None = None
    ) -> list[AsyncSession]:
        """Return *n* sessions that branch off from the present state, all or none of them.

        They are open, share this session's lease, and are closed with this session or by their own
        `async with`. *session_ids* are their ids, by which clients can attach to them again.
        """
        await self._turns.end_previous()
        result = await self._client.fork_session(
            self.context,
            n,
            session_ids=session_ids,
            queue_timeout=self._settings.queue_timeout,
            timeout=timeout,
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
        branch = AsyncSession(self._client, settings, attachment, trunk=self)
        self._branches.add(branch)
        return branch

    async def save_state(
        self, name: str, *, replace: bool = False, timeout: float | None = None
    ) -> w.SaveStateResult:
        """Save the present state as *name*, for `AsyncClient.session` with *from_state*.

        The state is kept over restarts, until it is deleted. With *replace* the name may be in use.
        """
        await self._turns.end_previous()
        return await self._client.save_state(self.context, name, replace=replace, timeout=timeout)

    async def rewind(
        self, turns: int | None = None, *, tokens: int | None = None, timeout: float | None = None
    ) -> w.RewindResult:
        """Drop the last *turns*, questions and answers, or all but the first *tokens* tokens."""
        await self._turns.end_previous()
        return await self._client.rewind(self.context, turns=turns, tokens=tokens, timeout=timeout)

    async def history(self, *, timeout: float | None = None) -> w.HistoryResult:
        """Return the messages, with the answer so far, and the turns; see `AsyncClient.history`."""
        await self._attachment.ensure_connected()
        return await self._client.history(self.context, timeout=timeout)

    async def media(self, sha256: str, *, timeout: float | None = None) -> w.SessionMediaResult:
        """Return the data of an image or a sound in the messages; see
        `AsyncClient.session_media`.
        """
        await self._attachment.ensure_connected()
        return await self._client.session_media(sha256, self.context, timeout=timeout)

    async def delete(self, *, timeout: float | None = None) -> None:
        """Delete the session and its stored data, and close it."""
        await self._turns.end_previous()
        await self._client.delete_session(self.context, timeout=timeout)
        self._attachment.context = None

    async def cancel(self, *, timeout: float | None = None) -> bool:
        """Cancel the turn under way, whichever task reads it; return whether there was one."""
        return await self._client.cancel(self.context, timeout=timeout)

    async def end_reasoning(self, *, timeout: float | None = None) -> w.EndReasoningResult:
        """End the present thought of the turn under way, so that its answer begins now; see
        `AsyncClient.end_reasoning`.
        """
        return await self._client.end_reasoning(self.context, timeout=timeout)

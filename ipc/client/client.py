"""The asynchronous client, with every call of the protocol, streamed turns and sessions."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, overload

from ...backends import ENGINES, format_of_file
from ...backends.errors import LoadFailed
from ...backends.gguf import PART
from ...backends.model_encodings import weights_of
from .. import messages as w
from ..handles import Graph
from ..names import Priority
from ..payloads import Config, Prompt, json_text, open_file
from .attachment import ClientSessionSettings, LossCallback
from .caller import as_event, send_request
from .connection.core import InFlight
from .graphs import AsyncTensorGraph
from .jobs import AsyncJobs
from .parameters import Options, Parameters
from .reranking import AsyncReranking
from .session import AsyncSession
from .streams import AsyncStream, StreamedTurn
from .texts import Reply, reply_of
from .tool_rounds import ROUNDS_MAX, ToolRounds, compute_chat
from .turn_settings import (
    PromptCallback,
    QueueCallback,
    SchedulingKeywords,
    TurnKeywords,
    TurnSettings,
    read_settings,
    stream_call,
    takes,
    with_parameters,
)
from .wasi_calls import ProgressCallback

T = TypeVar("T")

_PASSED_FILE = re.compile(r"descriptor-[0-9a-f]+|/proc/self/fd/\d+")
"""The names by which the daemon knows a file whose descriptor it got."""


class AsyncClient(AsyncReranking):
    """A client of the daemon, for asyncio and trio::

        async with AsyncClient() as client:
            print(await client.chat("smollm2", "Say hello."))

        async with AsyncClient() as client, client.session("smollm2") as session:
            async for piece in session.stream("Say hello."):
                print(piece, end="")

    It connects at `async with`, or with the first call; without `async with`, `aclose` it. *path*
    is the daemon's socket; the default is `INFERD_SOCKET`, else the user's own, else the
    system's. *timeout* is the default for each call. Calls refused with `Busy` or another retryable
    error are repeated up to *retries* times, after the time that the daemon returns, and never
    after the first token. With *reconnect*, the first call after a loss of the connection connects
    again; without it the loss is final. *resume_timeout* bounds how long this client tries to
    connect again, and how long sessions opened with `resume` try to attach again. *label* names
    this program among those of its user, which share fairly and see only their own sessions. A
    gateway with the right `delegate` acts *on_behalf_of* a user. Any number of tasks may share a
    client.
    """

    @property
    def jobs(self) -> AsyncJobs:
        """The jobs of the client's user: requests that outlive the client."""
        return AsyncJobs(self)

    async def load_file(
        self,
        path: str | os.PathLike[str],
        *,
        config: Config | None = None,
        target: int | str = "auto",
        on_progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Graph:
        """Load one of the user's own files: the daemon gets its descriptor, not its path.

        Of a split model it gets the path, because a descriptor has one part only; the parts must be
        in its models directory.
        """
        if PART.fullmatch(os.path.basename(path)):
            return await self._load_path(path, config, target, on_progress, timeout)
        opened = [await open_file(self._driver.run_in_thread, path)]
        builders: list[bytes | str] = [] if config is None else [b"", json_text(config)]
        try:
            if weights := weights_of(path):
                opened.append(await open_file(self._driver.run_in_thread, weights))
            return await self.load(
                builders,
                _encoding_of(path),
                target=target,
                fd=opened[0],
                weights_fd=opened[1] if weights else None,
                on_progress=on_progress,
                timeout=timeout,
            )
        except LoadFailed as exc:
            exc.message = _PASSED_FILE.sub(lambda _: os.path.basename(path), exc.message)
            raise
        finally:
            for fd in opened:
                os.close(fd)

    async def _load_path(
        self,
        path: str | os.PathLike[str],
        config: Config | None,
        target: int | str,
        on_progress: ProgressCallback | None,
        timeout: float | None,
    ) -> Graph:
        name = os.path.abspath(path)  # noqa: ASYNC240 - it reads no file
        builders: list[bytes | str] = [name] if config is None else [name, json_text(config)]
        return await self.load(builders, target=target, on_progress=on_progress, timeout=timeout)

    def session(
        self,
        model: str,
        *,
        system: str | None = None,
        session_id: str | None = None,
        persist: bool = True,
        from_state: str | None = None,
        resume: bool = False,
        raw: bool = False,
        priority: Priority = "normal",
        queue_timeout: float | None = None,
        options: Options | dict[str, Any] | None = None,
        config: Config | None = None,
        graph: Graph | None = None,
        on_progress: ProgressCallback | None = None,
        on_loss: LossCallback | None = None,
        **parameters: Unpack[Parameters],
    ) -> AsyncSession:
        """Return a conversation with *model*, to use as a context manager.

        *system* is its system prompt, *options* and *parameters* are those of its turns, and
        *config* is that of `load_by_name_with_config`. If the *session_id* exists, the session
        continues its history, and *system* applies from the next `reset`. With *from_state*, a new
        session begins with the history of that state, which `save_state` has saved; `OWNER/STATE`
        names a state that an access rule shares. Without *persist* nothing is written to disk.
        With *resume*, a session with an id attaches again after its connection was lost, even by
        a restart of the daemon, and its streams continue; *on_loss* is called with the error each
        time before it attaches again. *raw* turns the chat template off.
        If too many sessions are open, this one waits for a place in the class *priority*, for at
        most *queue_timeout* seconds; without *queue_timeout* it fails at once. With *graph*, a
        lease on the model over this connection, the session makes none of its own; the caller
        unloads the graph after the session.
        """
        settings = ClientSessionSettings(
            model=model,
            session_id=session_id,
            system=system,
            persist=persist,
            from_state=from_state,
            resume=resume,
            raw=raw,
            priority=priority,
            queue_timeout=queue_timeout,
            options=with_parameters(options, parameters),
            config=config,
            graph=graph,
            on_progress=on_progress,
            on_loss=on_loss,
        )
        return AsyncSession(self, settings)

    def graph(self, model: str) -> AsyncTensorGraph:
        """Return a graph that computes tensors, such as one in ONNX, to use as a context manager::

            async with client.graph("magika") as graph:
                outputs = await graph.run({"bytes": array})

        Nothing is sent before it is used.
        """
        return AsyncTensorGraph(self, model)

    @takes(TurnKeywords)
    def stream(
        self,
        context: int,
        prompt: Prompt | None = None,
        *,
        on_queue: QueueCallback | None = None,
        on_prompt: PromptCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> AsyncStream:
        """Stream one turn of a context, of its present input or of *prompt*.

        The chat template adds *prompt* to the history; with *raw* it is added unchanged. *on_queue*
        is called with the turn's place in the queue while the turn waits, and *on_prompt* with the
        progress of its prompt: a map of `total`, `cache`, `processed` and `time_ms`.
        """
        settings = self._turn_settings(keywords, on_queue, on_prompt)
        return self._stream(settings.stream_params(context, prompt), settings)

    @takes(SchedulingKeywords)
    def resume(
        self,
        context: int,
        tokens: Sequence[int] = (),
        text: str = "",
        *,
        reasoning: str = "",
        raw_text: str = "",
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> AsyncStream:
        """Resume the last turn of a context that was attached again, interrupted or ended.

        *tokens*, *text* and *reasoning* are the part already read; the stream begins after them.
        For a turn with `tools`, *raw_text* replaces text and reasoning.
        """
        settings = read_settings(self._seconds(None), keywords, on_queue, taken=SchedulingKeywords)
        params = settings.resume_params(context, tokens, text, reasoning, raw_text)
        return self._stream(params, settings)

    @overload
    async def chat(
        self,
        context: int | str,
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
        context: int | str,
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
        context: int | str,
        prompt: Prompt | None = None,
        *,
        schema: type | None = None,
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> Any:
        """Compute one turn of a context and return its whole text; arguments as in `stream`, and
        *schema* and functions in *tools* as in `AsyncSession.chat`.

        If *context* is a model's name, the turn gets a session of its own.
        """
        rounds = ToolRounds(self._driver, tool_rounds_max, self._seconds(keywords.get("timeout")))
        if isinstance(context, str):
            async with self.session(context) as session:
                turn = partial(session._chat, on_queue=on_queue)
                return await compute_chat(turn, prompt, keywords, schema, rounds)
        turn = partial(self._chat, context, on_queue=on_queue)
        return await compute_chat(turn, prompt, keywords, schema, rounds)

    @takes(TurnKeywords)
    async def infill(
        self,
        model: str,
        prefix: str,
        suffix: str,
        *,
        typed: str = "",
        extra: Sequence[tuple[str, str]] = (),
        suffix_first: bool = False,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> Reply:
        """Return the text that *model* writes between *prefix* and *suffix*, in a session of its
        own. `stream(Infill(…))` of a session streams it.

        It continues *typed*, text behind the prefix that is not in the file yet. *extra* are parts
        of other files, names and texts. With *supersede*, the name of an editor's buffer, a newer
        call cancels this one, which then raises `Cancelled`. With *suffix_first* the suffix
        precedes the prefix in the prompt, for models that were trained so.
        """
        place = w.Infill(
            prefix=prefix,
            suffix=suffix,
            typed=typed,
            extra=[{"name": name, "text": text} for name, text in extra],
            suffix_first=suffix_first,
        )
        async with self.session(model) as session:
            return await session._chat(place, keywords, on_queue=on_queue)

    async def _chat(
        self,
        context: int,
        prompt: Prompt | None,
        keywords: TurnKeywords,
        *,
        on_queue: QueueCallback | None,
    ) -> Reply:
        settings = self._turn_settings(keywords, on_queue)
        params = settings.stream_params(context, prompt)
        result = await self._call(
            "chat",
            params,
            w.TurnResult,
            settings.timeout,
            on_event=on_queue and (lambda event: on_queue(as_event(event, w.QueueEvent))),
        )
        return reply_of(result)

    def _turn_settings(
        self,
        keywords: TurnKeywords,
        on_queue: QueueCallback | None,
        on_prompt: PromptCallback | None = None,
    ) -> TurnSettings:
        return read_settings(self._seconds(None), keywords, on_queue, on_prompt)

    def _stream(
        self, params: w.StreamParams | w.ResumeParams, settings: TurnSettings
    ) -> AsyncStream:
        async def start(deadline: float) -> InFlight:
            request = InFlight(stream_call(params), deadline)
            connection = await self._live_connection(deadline)
            try:
                await send_request(connection, self._driver, request, params)
            except BaseException:
                connection.abandon_request(request)
                raise
            return request

        turn = StreamedTurn(
            start,
            self._driver,
            timeout_s=settings.timeout_s,
            retries=self._retries,
            on_queue=settings.on_queue,
            on_prompt=settings.on_prompt,
        )
        return AsyncStream(turn)


def _encoding_of(path: str | os.PathLike[str]) -> str:
    """Return the encoding of a graph by its file's name, which a damaged file does not tell."""
    one = format_of_file(os.path.basename(path))
    return one.encoding if ENGINES[one.backends[0]].graphs else "autodetect"

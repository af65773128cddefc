"""The asynchronous client: the wasi-nn calls, inferd's own, and sessions as people want them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc
import anyio.to_thread

from ...backends.errors import ConnectionLost, InvalidArgument
from .. import messages as w
from ..handles import Graph
from ..paths import client_socket_path
from ..payloads import Config, Priority, Prompt, json_text, opened, turn_input
from ..traceparent import traceparent_of
from .connection.connecting import hold, own_group
from .connection.connection import Connection
from .connection.inflight import InFlightT
from .embeddings import AsyncEmbedding
from .sessions.session import AsyncSession
from .streams.streams import (
    AsyncStream,
    GoingOn,
    QueueCallback,
    Starter,
    Turn,
    queue_events,
)
from .streams.texts import Reply, reply_of
from .wasi_calls import ProgressCallback

__all__ = ("AsyncClient",)


class AsyncClient(AsyncEmbedding):
    """A client of the daemon, under asyncio and trio::

        async with AsyncClient() as client, client.session("smollm2") as session:
            async for piece in session.stream("Say hello."):
                print(piece, end="")

    *path* is the daemon's socket (without one: `INFERD_SOCKET`, the user's own, the system's).
    *timeout* holds for each call that names none. `Busy` and its like are tried again *retries*
    times, after the time that the daemon names, and never after the first token. *resume_timeout*
    is how long sessions opened with `resume` try to attach again. Any number of tasks may use one
    client.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        resume_timeout: float = 60.0,
        retries: int = 0,
        software: str = "",
    ):
        seconds = (timeout, connect_timeout, resume_timeout)
        if not all(s > 0 for s in seconds) or retries < 0:
            raise InvalidArgument(
                f"timeout {timeout:g}, connect_timeout {connect_timeout:g}, resume_timeout"
                f" {resume_timeout:g}, retries {retries}",
                hint="timeouts are above 0 s, retries 0 or more",
            )
        super().__init__(timeout=timeout, retries=retries)
        self._path = Path(path) if path is not None else client_socket_path()
        self.resume_timeout = resume_timeout
        self._connect_timeout = connect_timeout
        self._software = software or "inferd python client"
        self._connection: Connection | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._connecting = anyio.Lock()
        self._stack = AsyncExitStack()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._path}>"

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return self._path

    @property
    def connection(self) -> Connection:
        """The connection that the calls go over.

        :raises ConnectionLost: the client is not open.
        """
        if self._connection is None:
            raise ConnectionLost(
                f"the client of {self._path} is not open",
                hint="use it as `async with AsyncClient() as client:`",
            )
        return self._connection

    @property
    def server(self) -> w.ServerHello:
        """What the daemon said of itself: software, protocol, limits, llama.cpp's build."""
        return self.connection.server

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise InvalidArgument("the client is open already", hint="make another one")
        group = await self._stack.enter_async_context(own_group())
        try:
            self._connection = await self._connect(group)
        except BaseException:
            await self._stack.aclose()
            raise
        self._group = group
        return self

    async def _connect(self, group: anyio.abc.TaskGroup) -> Connection:
        connection = await group.start(hold, str(self._path), self._software, self._connect_timeout)
        assert isinstance(connection, Connection)
        return connection

    async def reconnect(self) -> None:
        """Connect anew if the connection was lost; what belonged to it has ended.

        :raises ConnectionLost: no daemon answers.
        """
        async with self._connecting:
            if self._group is None:
                raise InvalidArgument("the client is not open", hint="open a new one")
            if self.connection.lost:
                self._connection = await self._connect(self._group)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._connection = self._group = None
        return await self._stack.__aexit__(kind, error, traceback)

    async def load_file(
        self,
        path: str | os.PathLike[str],
        *,
        config: Config | None = None,
        target: int | str = "auto",
        on_progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Graph:
        """Load a model file of one's own: the daemon gets its descriptor, not its path."""
        try:
            fd = await anyio.to_thread.run_sync(_open_file, path)
        except OSError as exc:
            raise InvalidArgument(
                f"{os.fspath(path)} cannot be read: {exc.strerror}", hint="check path and rights"
            ) from None
        builders: list[bytes | str] = [] if config is None else [b"", json_text(config)]
        with opened(fd):
            return await self.load(
                builders, target=target, fd=fd, on_progress=on_progress, timeout=timeout
            )

    def session(
        self,
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
    ) -> AsyncSession:
        """Return a conversation with *model*, to be used as a context manager.

        *system* is its system prompt, *options* are parameters of its turns, *config* is what
        `load_by_name_with_config` takes. With a *session_id* that is there already, its history
        goes on, and *system* counts from the next `reset`; without *persist* nothing of it is
        written to disk. With *resume* such a session attaches again where the connection is lost,
        after a restart of the daemon, too, and its streams go on. *raw* turns the chat template
        off.
        """
        return AsyncSession(
            self,
            model,
            system=system,
            session_id=session_id,
            persist=persist,
            resume=resume,
            raw=raw,
            priority=priority,
            options=options,
            config=config,
            on_progress=on_progress,
        )

    def turn_fields(
        self,
        prompt: Prompt | None,
        raw: bool,
        options: dict[str, Any] | None,
        priority: Priority | None,
        timeout: float | None,
        queue_timeout: float | None,
        traceparent: str | None,
    ) -> dict[str, Any]:
        """Return what the params of `stream`, `chat` and `answers` have in common."""
        text, messages = turn_input(prompt)
        return {
            "prompt": text,
            "messages": messages,
            "raw": raw,
            "options": options or {},
            "priority": priority or "",
            "queue_timeout_s": queue_timeout or 0.0,
            "timeout_s": self.limit_s(timeout),
            "traceparent": traceparent_of(traceparent),
        }

    def new_turn(
        self,
        start: Starter,
        timeout: float | None,
        on_end: Callable[[dict[str, Any]], None] | None = None,
        on_queue: QueueCallback | None = None,
        go_on: GoingOn | None = None,
    ) -> Turn:
        """Return a turn that *start* begins, with this client's timeout and retries."""
        return Turn(
            start,
            timeout=self.seconds(timeout),
            retries=self._retries,
            on_end=on_end,
            on_queue=on_queue,
            go_on=go_on,
        )

    def stream(
        self,
        context: int,
        prompt: Prompt | None = None,
        *,
        raw: bool = False,
        options: dict[str, Any] | None = None,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_queue: QueueCallback | None = None,
        traceparent: str | None = None,
    ) -> AsyncStream:
        """Stream one turn of a context: of its input as it is, or of *prompt* added to its history
        (by the chat template, or with *raw* as it stands).

        *on_queue* is told the turn's place in the queue, where it has to wait.
        """
        fields = self.turn_fields(
            prompt, raw, options, priority, timeout, queue_timeout, traceparent
        )
        params = w.StreamParams(context=context, watch=on_queue is not None, **fields)

        async def start(kind: type[InFlightT], deadline: float) -> InFlightT:
            request = kind("stream", deadline)
            await self.connection.start_request(request, params)
            return request

        return AsyncStream(self.new_turn(start, timeout, on_queue=on_queue))

    def resume(
        self,
        context: int,
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
        """Go on with a turn that was interrupted, of a context that was come back to; the stream
        begins after *tokens*, *text* and *reasoning*, what was read of it.
        """
        params = w.ResumeParams(
            context=context,
            tokens=list(tokens),
            text=text.encode(),
            reasoning=reasoning.encode(),
            priority=priority or "",
            queue_timeout_s=queue_timeout or 0.0,
            timeout_s=self.limit_s(timeout),
            traceparent=traceparent_of(traceparent),
            watch=on_queue is not None,
        )

        async def start(kind: type[InFlightT], deadline: float) -> InFlightT:
            request = kind("resume", deadline)
            await self.connection.start_request(request, params)
            return request

        return AsyncStream(self.new_turn(start, timeout, on_queue=on_queue))

    async def chat(
        self,
        context: int,
        prompt: Prompt | None = None,
        *,
        raw: bool = False,
        options: dict[str, Any] | None = None,
        priority: Priority | None = None,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        on_queue: QueueCallback | None = None,
        traceparent: str | None = None,
    ) -> Reply:
        """Do one turn of a context and return its whole text."""
        fields = self.turn_fields(
            prompt, raw, options, priority, timeout, queue_timeout, traceparent
        )
        params = w.StreamParams(context=context, watch=on_queue is not None, **fields)
        result = await self.call(
            "chat", params, w.TurnResult, timeout, on_event=queue_events(on_queue)
        )
        return reply_of(result)


def _open_file(path: str | os.PathLike[str]) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

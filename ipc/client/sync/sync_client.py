"""The synchronous twin of `AsyncClient`: same names, plain iterators and contexts.

The asynchronous client runs on an event loop in a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from ....backends.errors import ConnectionLost
from ...handles import Context, Graph
from ...messages import ServerHello
from ...payloads import Config, Priority, Prompt, TensorLike
from ..client import AsyncClient
from ..sessions.session import AsyncSession
from ..streams.streams import QueueCallback
from ..wasi_calls import ProgressCallback
from .sync_streams import Pull, Stream
from .wrapper import LoopThread, twin

__all__ = ("Client", "Session")


class Session:
    """A conversation with a model; `Client.session` makes it. See `AsyncSession`."""

    def __init__(self, thread: LoopThread, session: AsyncSession):
        self.thread, self.twin = thread, session

    def __repr__(self) -> str:
        return f"<Session with {self.twin.model}>"

    @property
    def model(self) -> str:
        """The model's name."""
        return self.twin.model

    @property
    def session_id(self) -> str | None:
        """The session's id, if it has one."""
        return self.twin.session_id

    @property
    def graph(self) -> Graph:
        """The session's lease on the model, and what the daemon said of it."""
        return self.twin.graph

    @property
    def context(self) -> Context:
        """The execution context's handle, for the wasi-nn calls."""
        return self.twin.context

    @property
    def attached(self) -> bool:
        """Whether the session was there before, with its history."""
        return self.twin.attached

    @property
    def metadata(self) -> dict[str, Any]:
        """What the last turn's end told."""
        return self.twin.metadata

    def __enter__(self) -> Self:
        self.thread.run(self.twin.__aenter__)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.thread.forked:
            self.thread.run(self.twin.__aexit__, None, None, None)

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
    ) -> Stream:
        """Stream a turn; see `AsyncSession.stream`."""
        return Stream(
            self.thread,
            self.twin.stream(
                prompt,
                raw=raw,
                options=options,
                priority=priority,
                timeout=timeout,
                queue_timeout=queue_timeout,
                on_queue=on_queue,
                traceparent=traceparent,
            ),
        )

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
    ) -> Stream:
        """Go on with a turn that was interrupted; see `AsyncSession.resume`."""
        return Stream(
            self.thread,
            self.twin.resume(
                tokens,
                text,
                reasoning=reasoning,
                priority=priority,
                timeout=timeout,
                queue_timeout=queue_timeout,
                on_queue=on_queue,
                traceparent=traceparent,
            ),
        )

    def pull(
        self,
        prompt: TensorLike | None = None,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> Pull:
        """Compute a turn token by token; see `AsyncSession.pull`."""
        pull = self.twin.pull(prompt, priority=priority, timeout=timeout, traceparent=traceparent)
        return Pull(self.thread, pull)

    def fork(
        self, n: int = 1, *, session_ids: Sequence[str] = (), timeout: float | None = None
    ) -> list[Session]:
        """Return *n* sessions that go on from here; see `AsyncSession.fork`."""
        twins = self.thread.run(self.twin.fork, n, session_ids=session_ids, timeout=timeout)
        return [Session(self.thread, session) for session in twins]

    answers = twin(AsyncSession.answers)
    chat = twin(AsyncSession.chat)
    set_options = twin(AsyncSession.set_options)
    parameters = twin(AsyncSession.parameters)
    reset = twin(AsyncSession.reset)
    rewind = twin(AsyncSession.rewind)
    forget = twin(AsyncSession.forget)
    cancel = twin(AsyncSession.cancel)


class Client:
    """The synchronous client::

        with Client() as client, client.session("smollm2") as session:
            for piece in session.stream("Say hello."):
                print(piece, end="")

    Takes what `AsyncClient` takes. It connects in `with`, or with the first call; then `close` it.
    Any number of threads may use it, in a notebook too. `on_progress` is called in the client's
    own thread; so is `on_queue` by `chat`, while a stream calls it where the stream is read.
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
        self.twin = AsyncClient(
            path,
            timeout=timeout,
            connect_timeout=connect_timeout,
            resume_timeout=resume_timeout,
            retries=retries,
            software=software,
        )
        self._lock = Lock()
        self._thread: LoopThread | None = None
        self._stack = ExitStack()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Client of {self.twin.path}>"

    @property
    def thread(self) -> LoopThread:
        """The loop that the client runs on; connects if it has not.

        :raises ConnectionLost: no daemon answers, or the client was closed.
        """
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = self._connect()
        return self._thread

    def _connect(self) -> LoopThread:
        if self._closed:
            raise ConnectionLost(
                f"the client of {self.twin.path} is closed", hint="make a new Client"
            )
        with ExitStack() as stack:
            thread = LoopThread()
            stack.callback(thread.close)
            stack.enter_context(thread.enter(self.twin))
            self._stack = stack.pop_all()
        return thread

    def open(self) -> Self:
        """Connect now."""
        _ = self.thread
        return self

    def close(self) -> None:
        """Close the connection and end the thread; closing again does nothing."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None and not thread.forked:
            self._stack.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return self.twin.path

    @property
    def server(self) -> ServerHello:
        """What the daemon said of itself: software, protocol, limits, llama.cpp's build."""
        self.open()
        return self.twin.server

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
    ) -> Session:
        """Return a conversation with *model*, to be used in `with`; see `AsyncClient.session`."""
        session = self.twin.session(
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
        return Session(self.thread, session)

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
    ) -> Stream:
        """Stream one turn of a context; see `AsyncClient.stream`."""
        thread = self.thread
        stream = self.twin.stream(
            context,
            prompt,
            raw=raw,
            options=options,
            priority=priority,
            timeout=timeout,
            queue_timeout=queue_timeout,
            on_queue=on_queue,
            traceparent=traceparent,
        )
        return Stream(thread, stream)

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
    ) -> Stream:
        """Go on with a turn that was interrupted; see `AsyncClient.resume`."""
        stream = self.twin.resume(
            context,
            tokens,
            text,
            reasoning=reasoning,
            priority=priority,
            timeout=timeout,
            queue_timeout=queue_timeout,
            on_queue=on_queue,
            traceparent=traceparent,
        )
        return Stream(self.thread, stream)

    load = twin(AsyncClient.load)
    load_file = twin(AsyncClient.load_file)
    load_by_name = twin(AsyncClient.load_by_name)
    load_by_name_with_config = twin(AsyncClient.load_by_name_with_config)
    init_execution_context = twin(AsyncClient.init_execution_context)
    init_execution_context_with_session_id = twin(
        AsyncClient.init_execution_context_with_session_id
    )
    set_input = twin(AsyncClient.set_input)
    compute = twin(AsyncClient.compute)
    compute_single = twin(AsyncClient.compute_single)
    get_output = twin(AsyncClient.get_output)
    get_output_single = twin(AsyncClient.get_output_single)
    fini_single = twin(AsyncClient.fini_single)
    finalize_execution_context = twin(AsyncClient.finalize_execution_context)
    close_execution_context = twin(AsyncClient.close_execution_context)
    unload = twin(AsyncClient.unload)
    prompt_init = twin(AsyncClient.prompt_init)
    prompt_compute = twin(AsyncClient.prompt_compute)
    init_backend = twin(AsyncClient.init_backend)
    deinit_backend = twin(AsyncClient.deinit_backend)
    run_inference = twin(AsyncClient.run_inference)
    chat = twin(AsyncClient.chat)
    embed = twin(AsyncClient.embed)
    cancel = twin(AsyncClient.cancel)
    park = twin(AsyncClient.park)
    reset = twin(AsyncClient.reset)
    rewind = twin(AsyncClient.rewind)
    fork_session = twin(AsyncClient.fork_session)
    forget = twin(AsyncClient.forget)
    set_options = twin(AsyncClient.set_options)
    parameters = twin(AsyncClient.parameters)
    models = twin(AsyncClient.models)
    show = twin(AsyncClient.show)
    unload_model = twin(AsyncClient.unload_model)
    pin = twin(AsyncClient.pin)
    unpin = twin(AsyncClient.unpin)
    swap = twin(AsyncClient.swap)
    add_adapter = twin(AsyncClient.add_adapter)
    remove_adapter = twin(AsyncClient.remove_adapter)
    sessions = twin(AsyncClient.sessions)
    queue = twin(AsyncClient.queue)
    stats = twin(AsyncClient.stats)
    tokenize = twin(AsyncClient.tokenize)
    detokenize = twin(AsyncClient.detokenize)
    apply_template = twin(AsyncClient.apply_template)
    log_level = twin(AsyncClient.log_level)
    drain = twin(AsyncClient.drain)

"""`Client` and `Session`: `AsyncClient` and `AsyncSession` for programs without an event loop.

They run the methods of an asynchronous object whose driver blocks, with the same keywords and
types. So every call is written once, and a synchronous one needs neither a loop nor a thread.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from ...backends.tensors import TensorInfo
from ..messages import ClientHello, ServerHello
from ..payloads import Prompt
from .arrays import ArrayLike
from .buffers import BufferView
from .client import AsyncClient
from .connection.blocking_connection import BlockingDriver
from .connection.driver import Driver, run_blocking
from .graphs import AsyncTensorGraph
from .jobs import AsyncJobs, JobResults
from .results import Metadata
from .session import AsyncPull, AsyncSession, SessionProperties
from .streams import AsyncStream, TurnSoFar
from .texts import Reply
from .tool_rounds import ROUNDS_MAX
from .turn_settings import QueueCallback, SchedulingKeywords, TurnKeywords

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Stream(TurnSoFar, Iterator[str], AbstractContextManager["Stream"]):
    """The pieces of a turn's text, as in `AsyncStream`; one thread at a time may read them.

    A stream has no thread of its own: its pieces are read from the socket when a thread waits for
    this or another answer of the same client. Credit bounds the number of unread pieces.

    A turn that is not read to its end is cancelled at the end of the `with` block, when the stream
    is deleted, or by the session's next call.
    """

    def __init__(self, stream: AsyncStream):
        self._stream, self._turn = stream, stream._turn

    def __next__(self) -> str:
        try:
            return run_blocking(self._stream.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Cancel the turn if it has not ended, and wait for its end."""
        run_blocking(self._stream.aclose())

    def __exit__(self, *_: object) -> None:
        self.close()


class Pull(Iterator[str], AbstractContextManager["Pull"]):
    """The pieces of a turn, each computed on demand, as in `AsyncPull`."""

    def __init__(self, pull: AsyncPull):
        self._pull = pull

    @property
    def metadata(self) -> Metadata:
        """The metadata of the turn's end; empty before."""
        return self._pull.metadata

    def __next__(self) -> str:
        try:
            return run_blocking(self._pull.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the turn if it has not ended."""
        run_blocking(self._pull.aclose())

    def __exit__(self, *_: object) -> None:
        self.close()


P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
S = TypeVar("S")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


class SyncObject(Protocol[A_co]):
    """A synchronous object that runs the methods of an asynchronous one, whose driver blocks."""

    @property
    def _asynchronous(self) -> A_co:
        """The asynchronous object."""


def synchronous(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncObject[A], P], R]:
    """Return a method that runs the coroutine function *method* in the calling thread."""

    @functools.wraps(method)
    def call(self: SyncObject[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run_blocking(method(self._asynchronous, *args, **kwargs))

    return call


def returning_sync_object(
    method: Callable[Concatenate[A, P], R], make: Callable[[R], S]
) -> Callable[Concatenate[SyncObject[A], P], S]:
    """Return a method that calls *method* and passes the asynchronous result to *make*."""

    @functools.wraps(method)
    def call(self: SyncObject[A], /, *args: P.args, **kwargs: P.kwargs) -> S:
        return make(method(self._asynchronous, *args, **kwargs))

    signature = inspect.signature(method).replace(return_annotation=make.__name__)
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def documented_as(method: Callable[..., object]) -> Callable[[F], F]:
    """Give a function the docstring and the signature of *method*, whose overloads it repeats."""

    def document(function: F) -> F:
        function.__doc__ = method.__doc__
        function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        return function

    return document


class Session(SessionProperties):
    """A conversation with a model, made by `Client.session`. See `AsyncSession`."""

    def __init__(self, session: AsyncSession):
        self._asynchronous, self._turns = session, session._turns

    def __repr__(self) -> str:
        return f"<Session with {self.model}>"

    def open(self) -> Self:
        """Open the session, unless it is open; without `with`, `close` it."""
        run_blocking(self._asynchronous.open())
        return self

    def close(self) -> None:
        """Cancel its turn and close the session, with its branches; a second call does nothing."""
        run_blocking(self._asynchronous.aclose())

    def __enter__(self) -> Self:
        run_blocking(self._asynchronous.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self._asynchronous.__aexit__(None, None, None))

    def fork(
        self, n: int = 1, *, session_ids: Sequence[str] = (), timeout: float | None = None
    ) -> list[Session]:
        """Return *n* sessions that branch off from the present state; see `AsyncSession.fork`."""
        branches = self._asynchronous.fork(n, session_ids=session_ids, timeout=timeout)
        return [Session(branch) for branch in run_blocking(branches)]

    stream = returning_sync_object(AsyncSession.stream, Stream)
    resume = returning_sync_object(AsyncSession.resume, Stream)
    pull = returning_sync_object(AsyncSession.pull, Pull)

    @overload
    def chat(
        self,
        prompt: Prompt | None = None,
        *,
        schema: type[T],
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> T: ...

    @overload
    def chat(
        self,
        prompt: Prompt | None = None,
        *,
        schema: None = None,
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> Reply: ...

    @documented_as(AsyncSession.chat)
    def chat(self, prompt: Prompt | None = None, **keywords: Any) -> Any:
        """Compute a turn; see `AsyncSession.chat`."""
        return run_blocking(self._asynchronous.chat(prompt, **keywords))

    answers = synchronous(AsyncSession.answers)
    set_options = synchronous(AsyncSession.set_options)
    parameters = synchronous(AsyncSession.parameters)
    reset = synchronous(AsyncSession.reset)
    rewind = synchronous(AsyncSession.rewind)
    history = synchronous(AsyncSession.history)
    media = synchronous(AsyncSession.media)
    save_state = synchronous(AsyncSession.save_state)
    delete = synchronous(AsyncSession.delete)
    cancel = synchronous(AsyncSession.cancel)
    end_reasoning = synchronous(AsyncSession.end_reasoning)


class TensorGraph:
    """A graph that computes tensors, made by `Client.graph`. See `AsyncTensorGraph`."""

    def __init__(self, graph: AsyncTensorGraph):
        self._asynchronous = graph

    def __repr__(self) -> str:
        return f"<TensorGraph {self.model}>"

    @property
    def model(self) -> str:
        """The model's name."""
        return self._asynchronous.model

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs, in their order. The model is loaded only if its file does not state them."""
        return run_blocking(self._asynchronous.describe()).inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs, in their order."""
        return run_blocking(self._asynchronous.describe()).outputs

    def describe(self) -> Self:
        """Read the inputs and outputs; see `AsyncTensorGraph.describe`."""
        run_blocking(self._asynchronous.describe())
        return self

    def open(self) -> Self:
        """Load the model, unless the graph is open; without `with`, `close` it."""
        run_blocking(self._asynchronous.open())
        return self

    def close(self) -> None:
        """Close it; a second call does nothing."""
        run_blocking(self._asynchronous.aclose())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def run(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        keep: None = None,
        out: Mapping[str, BufferView] | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> dict[str, NDArray[Any]]: ...

    @overload
    def run(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        keep: Collection[str],
        out: Mapping[str, BufferView] | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> dict[str, Any]: ...

    @documented_as(AsyncTensorGraph.run)
    def run(self, inputs: Mapping[str, ArrayLike], **keywords: Any) -> Any:
        """Compute the outputs of *inputs*; see `AsyncTensorGraph.run`."""
        return run_blocking(self._asynchronous.run(inputs, **keywords))

    run_tensors = synchronous(AsyncTensorGraph.run_tensors)
    free = synchronous(AsyncTensorGraph.free)


class Jobs:
    """The jobs of the client's user, `client.jobs`. See `AsyncJobs`."""

    def __init__(self, jobs: AsyncJobs):
        self._asynchronous = jobs

    def results(self, job_id: str, *, timeout: float | None = None) -> Iterator[dict[str, Any]]:
        """Return an iterator over the results so far; see `AsyncJobs.results`."""
        reader = JobResults(self._asynchronous._client, job_id, timeout)
        while (results := run_blocking(reader.read_next())) is not None:
            yield from results

    submit = synchronous(AsyncJobs.submit)
    upload = synchronous(AsyncJobs.upload)
    upload_part = synchronous(AsyncJobs.upload_part)
    submit_file = synchronous(AsyncJobs.submit_file)
    list = synchronous(AsyncJobs.list)
    get = synchronous(AsyncJobs.get)
    wait = synchronous(AsyncJobs.wait)
    cancel = synchronous(AsyncJobs.cancel)
    delete = synchronous(AsyncJobs.delete)
    files = synchronous(AsyncJobs.files)
    file = synchronous(AsyncJobs.file)
    read_file = synchronous(AsyncJobs.read_file)
    delete_file = synchronous(AsyncJobs.delete_file)


class _BlockingCalls(AsyncClient):
    """The asynchronous client with a driver that blocks."""

    def _make_driver(self, path: str, hello: ClientHello, connect_timeout_s: float) -> Driver:
        return BlockingDriver(path, hello, connect_timeout_s)

    def __repr__(self) -> str:
        return f"<Client of {self.path}>"


class Client:
    """The synchronous client::

        with Client() as client:
            print(client.chat("smollm2", "Say hello."))

        with Client() as client, client.session("smollm2") as session:
            for piece in session.stream("Say hello."):
                print(piece, end="")

    The arguments are those of `AsyncClient`. It connects at `with`, or with the first call; without
    `with`, `close` it. Any number of threads may share it, in a notebook too; it has no thread of
    its own. The calling thread calls `on_progress` and `on_queue`. Ctrl-C in a call cancels it in
    the daemon and leaves the client usable.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout: float = 600.0,
        connect_timeout: float = 5.0,
        resume_timeout: float = 60.0,
        retries: int = 0,
        reconnect: bool = False,
        software: str = "",
        label: str = "",
        on_behalf_of: str = "",
        key: str = "",
        key_limits: Mapping[str, int] | None = None,
    ):
        self._arguments: dict[str, Any] = {
            "timeout": timeout,
            "connect_timeout": connect_timeout,
            "resume_timeout": resume_timeout,
            "retries": retries,
            "reconnect": reconnect,
            "software": software,
            "label": label,
            "on_behalf_of": on_behalf_of,
            "key": key,
            "key_limits": key_limits,
        }
        self._asynchronous = _BlockingCalls(path, **self._arguments)

    def __repr__(self) -> str:
        return f"<Client of {self._asynchronous.path}>"

    def copy(self) -> Self:
        """Return another client with the same arguments, not connected yet."""
        return type(self)(self.path, **self._arguments)

    def open(self) -> Self:
        """Connect now."""
        run_blocking(self._asynchronous.open())
        return self

    def close(self) -> None:
        """Close the connection, which ends all calls; a second call does nothing."""
        run_blocking(self._asynchronous.aclose())

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The daemon's socket."""
        return self._asynchronous.path

    @property
    def connected(self) -> bool:
        """Whether the connection to the daemon stands."""
        return self._asynchronous.connected

    @property
    def server(self) -> ServerHello:
        """The daemon's hello: its software, protocol and limits, and llama.cpp's build."""
        self.open()
        return self._asynchronous.server

    @property
    def jobs(self) -> Jobs:
        """The jobs of the client's user: requests that outlive the client."""
        return Jobs(self._asynchronous.jobs)

    session = returning_sync_object(AsyncClient.session, Session)
    graph = returning_sync_object(AsyncClient.graph, TensorGraph)
    stream = returning_sync_object(AsyncClient.stream, Stream)
    resume = returning_sync_object(AsyncClient.resume, Stream)
    load = synchronous(AsyncClient.load)
    load_file = synchronous(AsyncClient.load_file)
    load_by_name = synchronous(AsyncClient.load_by_name)
    load_by_name_with_config = synchronous(AsyncClient.load_by_name_with_config)
    init_execution_context = synchronous(AsyncClient.init_execution_context)
    init_execution_context_with_session_id = synchronous(
        AsyncClient.init_execution_context_with_session_id
    )
    set_input = synchronous(AsyncClient.set_input)
    compute = synchronous(AsyncClient.compute)
    free_tensors = synchronous(AsyncClient.free_tensors)
    buffer = synchronous(AsyncClient.buffer)
    register_buffer = synchronous(AsyncClient.register_buffer)
    write_buffer = synchronous(AsyncClient.write_buffer)
    read_buffer = synchronous(AsyncClient.read_buffer)
    free_buffers = synchronous(AsyncClient.free_buffers)
    open_channel = synchronous(AsyncClient.open_channel)
    compute_single = synchronous(AsyncClient.compute_single)
    get_output = synchronous(AsyncClient.get_output)
    get_output_single = synchronous(AsyncClient.get_output_single)
    fini_single = synchronous(AsyncClient.fini_single)
    finalize_execution_context = synchronous(AsyncClient.finalize_execution_context)
    close_execution_context = synchronous(AsyncClient.close_execution_context)
    unload = synchronous(AsyncClient.unload)
    prompt_init = synchronous(AsyncClient.prompt_init)
    prompt_compute = synchronous(AsyncClient.prompt_compute)
    init_backend = synchronous(AsyncClient.init_backend)
    deinit_backend = synchronous(AsyncClient.deinit_backend)
    run_inference = synchronous(AsyncClient.run_inference)

    @overload
    def chat(
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
    def chat(
        self,
        context: int | str,
        prompt: Prompt | None = None,
        *,
        schema: None = None,
        tool_rounds_max: int = ROUNDS_MAX,
        on_queue: QueueCallback | None = None,
        **keywords: Unpack[TurnKeywords],
    ) -> Reply: ...

    @documented_as(AsyncClient.chat)
    def chat(self, context: int | str, prompt: Prompt | None = None, **keywords: Any) -> Any:
        """Compute a turn; see `AsyncClient.chat`."""
        return run_blocking(self._asynchronous.chat(context, prompt, **keywords))

    embed = synchronous(AsyncClient.embed)
    rerank = synchronous(AsyncClient.rerank)
    cancel = synchronous(AsyncClient.cancel)
    park = synchronous(AsyncClient.park)
    end_reasoning = synchronous(AsyncClient.end_reasoning)
    reset = synchronous(AsyncClient.reset)
    rewind = synchronous(AsyncClient.rewind)
    history = synchronous(AsyncClient.history)
    session_media = synchronous(AsyncClient.session_media)
    fork_session = synchronous(AsyncClient.fork_session)
    delete_session = synchronous(AsyncClient.delete_session)
    restore_session = synchronous(AsyncClient.restore_session)
    update_session = synchronous(AsyncClient.update_session)
    list_deletions = synchronous(AsyncClient.list_deletions)
    usage = synchronous(AsyncClient.usage)
    usage_and_limits = synchronous(AsyncClient.usage_and_limits)
    list_sessions = synchronous(AsyncClient.list_sessions)
    save_state = synchronous(AsyncClient.save_state)
    read_copy = synchronous(AsyncClient.read_copy)
    store_copy = synchronous(AsyncClient.store_copy)
    add_model = synchronous(AsyncClient.add_model)
    copy_model = synchronous(AsyncClient.copy_model)
    export_model = synchronous(AsyncClient.export_model)
    import_model = synchronous(AsyncClient.import_model)
    end_model_transfer = synchronous(AsyncClient.end_model_transfer)
    export_session = synchronous(AsyncClient.export_session)
    import_session = synchronous(AsyncClient.import_session)
    end_transfer = synchronous(AsyncClient.end_transfer)
    exchange_served = synchronous(AsyncClient.exchange_served)
    list_states = synchronous(AsyncClient.list_states)
    delete_state = synchronous(AsyncClient.delete_state)
    set_options = synchronous(AsyncClient.set_options)
    parameters = synchronous(AsyncClient.parameters)
    models = synchronous(AsyncClient.models)
    files_not_offered = synchronous(AsyncClient.files_not_offered)
    show = synchronous(AsyncClient.show)
    unload_model = synchronous(AsyncClient.unload_model)
    pin = synchronous(AsyncClient.pin)
    unpin = synchronous(AsyncClient.unpin)
    swap = synchronous(AsyncClient.swap)
    add_adapter = synchronous(AsyncClient.add_adapter)
    remove_adapter = synchronous(AsyncClient.remove_adapter)
    sessions = synchronous(AsyncClient.sessions)
    queue = synchronous(AsyncClient.queue)
    stats = synchronous(AsyncClient.stats)
    metrics = synchronous(AsyncClient.metrics)
    tokenize = synchronous(AsyncClient.tokenize)
    detokenize = synchronous(AsyncClient.detokenize)
    token_pieces = synchronous(AsyncClient.token_pieces)
    infill = synchronous(AsyncClient.infill)
    apply_template = synchronous(AsyncClient.apply_template)
    log_level = synchronous(AsyncClient.log_level)
    drain = synchronous(AsyncClient.drain)

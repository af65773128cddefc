"""The wasi-nn calls under their own names, as methods of the asynchronous client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias, Unpack

from ...backends.model_encodings import encoding_of_bytes
from .. import messages as w
from ..handles import Context, Graph
from ..names import Priority
from ..payloads import Config, Payload, TensorLike, json_text, traceparent_of
from .caller import AsyncCaller, as_event
from .texts import Reply, reply_of
from .turn_settings import SchedulingKeywords, read_settings, takes, wire_seconds

NamedTensors: TypeAlias = "Mapping[str, TensorLike] | Sequence[tuple[str, TensorLike]]"
ProgressCallback = Callable[[float], None]
_MODEL_BYTES_MIN = 4096
"""A builder of at least this size is a model's bytes, not its name."""


class AsyncWasiCalls(AsyncCaller):
    """The wasi-nn calls."""

    async def load(
        self,
        builders: str | bytes | Sequence[bytes | str] = (),
        encoding: int | str = "autodetect",
        target: int | str = "auto",
        *,
        fd: int | None = None,
        weights_fd: int | None = None,
        on_progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Graph:
        """Load a model by its name (or ``preload:NAME``), from its bytes, or from *fd*.

        `builders[0]` is the name or the bytes, which are sent in a memfd; `builders[1]` may be
        parameters as JSON text. A single text or bytes object is the first builder. *fd* is a
        descriptor of the model's file opened for reading. Of a graph of OpenVINO, the bytes of the
        weights are `builders[1]`, parameters `builders[2]`; *weights_fd* is their descriptor.
        """
        builders = [builders] if isinstance(builders, str | bytes) else builders
        parts = [b.encode() if isinstance(b, str) else bytes(b) for b in builders]
        params = w.LoadParams(
            builders=parts, encoding=encoding, target=target, progress=on_progress is not None
        )
        with closing(Payload(self._driver.run_in_thread)) as packed:
            descriptors = packed.descriptors if fd is None else [fd]
            if fd is not None and weights_fd is not None:
                descriptors.append(weights_fd)
            if not descriptors and parts and _is_model(parts[0]):
                has_weights = _is_openvino(encoding, parts[0])
                for builder in parts[: 2 if has_weights else 1]:
                    await packed.add_memfd(builder)
                parts[:] = [b"", *parts[len(descriptors) :]]
            params.fd = 0 if descriptors else -1
            params.weights = w.Tensor(fd=1) if len(descriptors) > 1 else None
            return await self._load("load", params, on_progress, timeout, descriptors)

    async def load_by_name(
        self,
        name: str,
        *,
        on_progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Graph:
        """Load a model by its name."""
        params = w.LoadByNameParams(name=name, progress=on_progress is not None)
        return await self._load("load_by_name", params, on_progress, timeout)

    async def load_by_name_with_config(
        self,
        name: str,
        config: Config = "",
        *,
        on_progress: ProgressCallback | None = None,
        timeout: float | None = None,
    ) -> Graph:
        """Load a model by its name, with the parameters of *config* for this graph."""
        params = w.LoadByNameWithConfigParams(
            name=name, config=json_text(config), progress=on_progress is not None
        )
        return await self._load("load_by_name_with_config", params, on_progress, timeout)

    async def _load(
        self,
        call: str,
        params: Any,
        on_progress: ProgressCallback | None,
        timeout: float | None,
        descriptors: Sequence[int] = (),
    ) -> Graph:
        result = await self._call(
            call,
            params,
            w.GraphResult,
            timeout,
            descriptors=descriptors,
            on_event=on_progress
            and (lambda event: on_progress(as_event(event, w.ProgressEvent).progress)),
        )
        return Graph.from_result(result)

    async def _open_context(
        self,
        call: str,
        params: w.OpenParams | w.SessionParams,
        queue_timeout: float | None,
        timeout: float | None,
    ) -> Context:
        if queue_timeout:
            params.queue_timeout_s = queue_timeout
        return Context.from_result(await self._call(call, params, w.ContextResult, timeout))

    async def init_execution_context(
        self,
        graph: int,
        *,
        priority: Priority | None = None,
        queue_timeout: float | None = None,
        from_state: str | None = None,
        timeout: float | None = None,
    ) -> Context:
        """Open an execution context on a graph, with the history of the named state *from_state*.

        *priority* is the class of its turns. If too many contexts are open, the call waits in this
        class for at most *queue_timeout* seconds; without *queue_timeout* it fails at once.
        """
        params = w.OpenParams(graph=graph, priority=priority or "", from_state=from_state or "")
        return await self._open_context("init_execution_context", params, queue_timeout, timeout)

    async def init_execution_context_with_session_id(
        self,
        graph: int,
        session_id: str,
        *,
        persist: bool = True,
        priority: Priority | None = None,
        queue_timeout: float | None = None,
        from_state: str | None = None,
        timeout: float | None = None,
    ) -> Context:
        """Open an execution context with an id, or attach to the existing one and its history.

        Without *persist* nothing is written to disk. *priority*, *queue_timeout* and *from_state*
        are as in `init_execution_context`; an existing context keeps its own history.
        """
        params = w.SessionParams(
            graph=graph,
            session_id=session_id,
            persist=persist,
            priority=priority or "",
            from_state=from_state or "",
        )
        call = "init_execution_context_with_session_id"
        return await self._open_context(call, params, queue_timeout, timeout)

    async def set_input(
        self, context: int, index: int, tensor: TensorLike, *, timeout: float | None = None
    ) -> None:
        """Set a context's prompt, which replaces the history, or at index 1 its parameters (JSON).

        A tensor that does not fit into a frame is sent in a memfd.
        """
        with closing(Payload(self._driver.run_in_thread)) as packed:
            params = w.SetInputParams(
                context=context, index=index, tensor=await packed.pack_tensor(tensor)
            )
            await self._call("set_input", params, w.Empty, timeout, descriptors=packed.descriptors)

    @takes(SchedulingKeywords)
    async def compute(
        self,
        context: int,
        inputs: NamedTensors | None = None,
        *,
        keep: Collection[str] = (),
        places: Collection[tuple[str, int, int, int]] = (),
        free: Collection[int] = (),
        **keywords: Unpack[SchedulingKeywords],
    ) -> w.ComputeResult:
        """Compute a whole turn on the context's input, or on named tensors with named outputs.

        *inputs* is a mapping, or a list of pairs, as the result's `outputs` are. The outputs of a
        graph that *keep* names stay in the daemon, and the tensors with the handles *free* are
        freed. *places* are the names of outputs that are written to buffers, each with the handle,
        the offset and the length.
        """
        settings = read_settings(self._seconds(None), keywords, taken=SchedulingKeywords)
        with closing(Payload(self._driver.run_in_thread)) as packed:
            named = None
            if inputs is not None:
                pairs = inputs.items() if isinstance(inputs, Mapping) else inputs
                named = [(name, await packed.pack_tensor(t)) for name, t in pairs]
            params = settings.add_scheduling(
                w.ComputeParams(
                    context=context,
                    inputs=named,
                    keep=list(keep),
                    outputs=list(places),
                    free=list(free),
                )
            )
            return await self._call(
                "compute", params, w.ComputeResult, settings.timeout, descriptors=packed.descriptors
            )

    @takes(SchedulingKeywords)
    async def compute_single(self, context: int, **keywords: Unpack[SchedulingKeywords]) -> bytes:
        """Compute the next token and return its text, as `get_output_single` would.

        :raises EndOfSequence: the turn has ended; the metadata at index 1 has the reason.
        """
        settings = read_settings(self._seconds(None), keywords, taken=SchedulingKeywords)
        # timeout_s is not sent: the daemon would apply it to the turn, but here it is for a token.
        params = w.ComputeSingleParams(
            context=context,
            priority=settings.priority or "",
            queue_timeout_s=settings.queue_timeout or 0.0,
            traceparent=traceparent_of(settings.traceparent),
        )
        result = await self._call("compute_single", params, w.ComputeSingleResult, settings.timeout)
        return result.piece

    async def get_output(
        self, context: int, index: int = 0, *, size_max: int = -1, timeout: float | None = None
    ) -> bytes:
        """Return the text so far, or at index 1 the metadata as JSON.

        :raises TooLarge: the output has more than *size_max* bytes (-1 for no bound).
        """
        params = w.GetOutputParams(context=context, index=index, size_max=size_max)
        return (await self._call("get_output", params, w.OutputResult, timeout)).data

    async def get_output_single(
        self, context: int, index: int = 0, *, size_max: int = -1, timeout: float | None = None
    ) -> bytes:
        """Return the last token's text, or at index 1 the metadata as JSON."""
        params = w.GetOutputParams(context=context, index=index, size_max=size_max)
        return (await self._call("get_output_single", params, w.OutputResult, timeout)).data

    async def fini_single(self, context: int, *, timeout: float | None = None) -> None:
        """End the turn; the history keeps the tokens that were read."""
        await self._call("fini_single", w.ContextParams(context=context), w.Empty, timeout)

    async def finalize_execution_context(
        self, context: int, *, keep: bool = False, timeout: float | None = None
    ) -> None:
        """Close a context; with *keep*, clients can attach to its session id again."""
        params = w.FinalizeParams(context=context, keep=keep)
        await self._call("finalize_execution_context", params, w.Empty, timeout)

    async def close_execution_context(self, context: int, *, timeout: float | None = None) -> None:
        """Close a context, under the name that wasi_nn_backend uses."""
        params = w.FinalizeParams(context=context)
        await self._call("close_execution_context", params, w.Empty, timeout)

    async def unload(self, graph: int, *, keep: bool = False, timeout: float | None = None) -> None:
        """End this lease on a model, and its contexts; their outputs can still be read.

        With *keep* the model stays loaded for as long as the daemon keeps an idle model.
        """
        await self._call("unload", w.UnloadParams(graph=graph, keep=keep), w.Empty, timeout)

    async def prompt_init(
        self,
        graph: int,
        *,
        priority: Priority | None = None,
        queue_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Context:
        """Open a context of the prompt interface, as `init_execution_context` does."""
        params = w.OpenParams(graph=graph, priority=priority or "")
        return await self._open_context("prompt_init", params, queue_timeout, timeout)

    async def prompt_compute(
        self,
        context: int,
        prompt: str,
        *,
        priority: Priority | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> str:
        """Compute the answer to a prompt that is used as it is, without the chat template. The
        context's history keeps prompt and answer.
        """
        params = w.PromptComputeParams(
            context=context,
            prompt=prompt,
            priority=priority or "",
            timeout_s=wire_seconds(self._seconds(timeout)),
            traceparent=traceparent_of(traceparent),
        )
        return (await self._call("prompt_compute", params, w.PromptComputeResult, timeout)).text

    async def init_backend(self, config: Config = "", *, timeout: float | None = None) -> list[str]:
        """Give later graphs wasi_nn_backend's defaults, with the memory policy of *config*: full
        contexts are shifted, and `seed` is 1234. Return the ignored keys, which only the operator
        sets.
        """
        params = w.InitBackendParams(config=json_text(config))
        return (await self._call("init_backend", params, w.InitBackendResult, timeout)).ignored

    async def deinit_backend(self, *, timeout: float | None = None) -> None:
        """Close this connection's contexts and graphs."""
        await self._call("deinit_backend", w.Empty(), w.Empty, timeout)

    async def run_inference(
        self,
        context: int,
        tensor: TensorLike,
        *,
        index: int = 0,
        config: Config = "",
        size_max: int = -1,
        priority: Priority | None = None,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> Reply:
        """Compute one turn by the chat template and add it to the history."""
        with closing(Payload(self._driver.run_in_thread)) as packed:
            params = w.RunInferenceParams(
                context=context,
                tensor=await packed.pack_tensor(tensor),
                index=index,
                config=json_text(config),
                size_max=size_max,
                priority=priority or "",
                timeout_s=wire_seconds(self._seconds(timeout)),
                traceparent=traceparent_of(traceparent),
            )
            result = await self._call(
                "run_inference", params, w.TurnResult, timeout, descriptors=packed.descriptors
            )
        return reply_of(result)


def _is_model(builder: bytes) -> bool:
    return bool(encoding_of_bytes(builder)) or len(builder) >= _MODEL_BYTES_MIN


def _is_openvino(encoding: int | str, builder: bytes) -> bool:
    """Return whether bytes are a graph of OpenVINO, whose weights are the second builder."""
    if encoding_of_bytes(builder):
        return encoding_of_bytes(builder) == "openvino"
    return encoding in (w.ENCODINGS["openvino"], "openvino")

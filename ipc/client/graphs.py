"""Graphs that compute tensors, at the client's end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, Unpack, overload
from warnings import warn

import msgspec

from ...backends import ENGINES
from ...backends.errors import (
    InferdError,
    InvalidArgument,
    NotFound,
    ProtocolError,
    SessionExpired,
    TooLarge,
)
from ...backends.tensors import DeclaredTensors, TensorInfo
from .. import messages as w
from ..handles import Context, Graph
from ..model_names import is_test_model
from .arrays import ArrayLike, array_of, find_numpy, tensor_of, type_name_of
from .attachment import require_open
from .buffers import BufferView
from .caller import CLOSE_S_MAX
from .channels import GraphChannel
from .connection.core import ConnectionCore
from .kept_tensors import KeptTensor
from .large_tensors import Inputs, LargeTensors, Place, Read
from .operations import AsyncOperations
from .results import ShownModel
from .turn_settings import SchedulingKeywords, takes

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONTEXTS_MAX = 16
"""Unused contexts that an open graph keeps."""
_SHOWN_MAX = 16


class AsyncTensorGraph:
    """A graph that computes tensors, made by `AsyncClient.graph`. Any number of tasks may run it.

    `async with` opens it, loading the model if necessary, and closes it; `open` and `aclose` do so
    without a block. An open graph keeps the model loaded, and its runs use the same contexts. A run
    of a graph that is not open takes longer: it opens and closes one. Small runs of an open graph
    reach its process through a channel, if the daemon opens one.
    """

    def __init__(self, client: AsyncOperations, model: str, *, with_channel: bool = True):
        self._client, self._model = client, model
        self._with_channel = with_channel
        self._channel: GraphChannel | None = None
        self._declared: DeclaredTensors | None = None
        self._graph: Graph | None = None
        self._connection: ConnectionCore | None = None
        self._contexts: list[Context] = []
        self._unused: deque[int] = deque()
        """The handles of kept tensors that the next run frees."""
        self._large = LargeTensors(client.buffer, client._driver.run_in_thread)
        self._opening = client._driver.lock()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._model}>"

    @property
    def model(self) -> str:
        """The model's name."""
        return self._model

    @property
    def inputs(self) -> tuple[TensorInfo, ...]:
        """The inputs, in their order; known once it was opened or described."""
        return self._known().inputs

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The outputs, in their order; known once it was opened or described."""
        return self._known().outputs

    def _known(self) -> DeclaredTensors:
        if self._declared is None:
            raise InvalidArgument(
                "the inputs and outputs are not known yet",
                hint="use `async with client.graph(…) as graph:`, or await graph.describe()",
            )
        return self._declared

    async def describe(self) -> Self:
        """Read the inputs and outputs. The model is loaded only if its file does not state them.

        :raises InvalidArgument: it is not a graph.
        """
        await self._read_declared()
        if self._declared is None:
            async with AsyncTensorGraph(self._client, self._model, with_channel=False) as opened:
                self._declared = opened._declared
        return self

    async def _read_declared(self) -> None:
        """Read the inputs and outputs that are known without a load.

        :raises InvalidArgument: it is a language model.
        """
        if self._declared is None:
            shown = await self._client.show(self._model)
            engine = ENGINES.get(shown["backend"])
            if engine is not None and not engine.graphs and not is_test_model(shown):
                raise _language_model(self._model)
            self._declared = _declared_in(shown)

    async def open(self) -> Self:
        """Load the model, unless the graph is open; without `async with`, `aclose` it.

        :raises InvalidArgument: it is not a graph.
        """
        async with self._opening:
            if self._is_lost:  # the next daemon may have another file
                self._declared = None
            if self._graph is None or self._is_lost:
                await self._open()
        return self

    @property
    def _is_lost(self) -> bool:
        return self._connection is not None and self._connection.lost

    async def _open(self) -> None:
        client = self._client
        self._contexts, self._graph, self._unused = [], None, deque()
        self._close_channel()
        self._large.clear()
        await self._read_declared()
        graph = await client.load_by_name(self._model)
        self._graph, self._connection = graph, client._open_connection
        try:
            if not graph.tensors:
                raise _language_model(self._model)
            if self._declared is None:
                self._declared = _declared_in(await client.show(self._model)) or _NOTHING_DECLARED
            if self._with_channel:
                self._channel = GraphChannel(client, self._connection, graph)
        except BaseException:
            await self.aclose()
            raise

    def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    async def aclose(self) -> None:
        """Close it; a second call does nothing."""
        contexts, graph = self._contexts, self._graph
        self._contexts, self._graph = [], None
        self._close_channel()
        self._large.clear()
        if graph is None or self._is_lost:
            return  # the daemon has closed them
        for context in contexts:
            await self._close_context(context)
        with self._client._driver.shield(), suppress(InferdError):
            await self._client.unload(graph, keep=True, timeout=CLOSE_S_MAX)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_channel", None) is not None:  # not after a failed __init__
            self._close_channel()
        graph, connection = getattr(self, "_graph", None), getattr(self, "_connection", None)
        if graph is None or connection is None or connection.lost or connection.forked:
            return
        params = w.UnloadParams(graph=graph, keep=True)
        connection.run_soon(lambda: connection.post_request("unload", params))
        text = f"unclosed {self!r}: use `async with` (`with` for `Client`), or close it"
        warn(text, ResourceWarning, stacklevel=2, source=self)

    @overload
    async def run(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        keep: None = None,
        out: Mapping[str, BufferView] | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> dict[str, NDArray[Any]]: ...

    @overload
    async def run(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        keep: Collection[str],
        out: Mapping[str, BufferView] | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> dict[str, Any]: ...

    @takes(SchedulingKeywords)
    async def run(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        keep: Collection[str] | None = None,
        out: Mapping[str, BufferView] | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> dict[str, Any]:
        """Compute the outputs of *inputs*, both by their names.

        An input is an array of NumPy, a list of numbers, a buffer or a `Tensor`. Outputs are arrays
        of NumPy; without NumPy they are tensors. bfloat16 becomes float32. The outputs that *keep*
        names stay in the daemon, as inputs of later runs; in their place are `KeptTensor`s. Those
        in *out* are written there, to buffers of `client.buffer`; their arrays are in place. Other
        tensors that are too large for a frame are copied through buffers that the graph keeps:
        arrays of more than 8 MiB must not change before the run has ended.

        :raises InvalidArgument: an input is missing or unknown, or has another type or shape.
        :raises NotFound: a kept tensor was lost: with its connection, or because the model was
            swapped.
        """
        read = BufferView.read_into_array
        found = await self._run_tensors(inputs, keep or (), out or {}, keywords, read)
        return {
            name: self._value_of(tensor, (out or {}).get(name)) for name, tensor in found.items()
        }

    def _value_of(self, tensor: w.Tensor, place: BufferView | None) -> Any:
        if tensor.kept:
            return KeptTensor(tensor, type_name_of(tensor), self._unused)
        if place is not None:
            written = place.resized(tensor.dimensions, type_name_of(tensor))
            return written if find_numpy() is None else written.array
        return array_of(tensor)

    @takes(SchedulingKeywords)
    async def run_tensors(
        self,
        inputs: Mapping[str, ArrayLike],
        *,
        keep: Collection[str] | None = None,
        out: Mapping[str, BufferView] | None = None,
        **keywords: Unpack[SchedulingKeywords],
    ) -> dict[str, w.Tensor]:
        """As `run`, with the outputs as tensors: their bytes, dimensions and types. Those that stay
        have a handle in place of their bytes (`kept`), which the caller frees; those in *out* have
        the place (`buffer`, `offset`, `length`).
        """
        return await self._run_tensors(inputs, keep or (), out or {}, keywords, BufferView.read)

    async def _run_tensors(
        self,
        inputs: Mapping[str, ArrayLike],
        keep: Collection[str],
        out: Mapping[str, BufferView],
        keywords: SchedulingKeywords,
        read: Read,
    ) -> dict[str, w.Tensor]:
        if self._graph is None:
            if keep:
                raise InvalidArgument(
                    "outputs stay only while the graph is open",
                    hint="use `with client.graph(…) as graph:`, or open it",
                )
            opened = AsyncTensorGraph(self._client, self._model, with_channel=False)
            opened._declared = self._declared
            async with opened:
                self._declared = opened._declared
                return await opened._run_tensors(inputs, (), out, keywords, read)
        channel = self._channel
        if channel is None or not channel.is_open:
            await self._open_if_lost()
            channel = self._channel
        named = self._named(inputs)
        is_plain = not (keep or out or self._unused or self._large.in_buffers)
        if channel is not None and is_plain and channel.takes(named, keywords):
            deadline = time.monotonic() + self._client._seconds(keywords.get("timeout"))
            found = await self._compute_in_channel(channel, named, deadline, keywords)
            if found is not None:
                return found
            await self._open_if_lost()
            keywords = keywords.copy()
            keywords["timeout"] = max(0.0, deadline - time.monotonic())
        own = [one.as_place(name) for name, one in out.items()]
        placed = {*keep, *(name for name, *_ in own)}

        async def compute(inputs: Inputs, places: Sequence[Place]) -> dict[str, w.Tensor]:
            return await self._compute(inputs, keep, [*own, *places], keywords)

        async def outputs() -> list[str]:
            return [one.name for one in self.outputs if one.name not in placed]

        return await self._large.compute(named, compute, outputs, read=read)

    async def _compute_in_channel(
        self,
        channel: GraphChannel,
        inputs: Inputs,
        deadline: float,
        keywords: SchedulingKeywords,
    ) -> dict[str, w.Tensor] | None:
        """Return the outputs, or None if the daemon has to compute them."""
        try:
            return await channel.compute(inputs, deadline, keywords)
        except TooLarge as exc:
            if not self._large.note_outputs(exc):
                raise
            return None

    async def _open_if_lost(self) -> None:
        """Open the graph again if its connection was lost, and the client reconnects.

        :raises ConnectionLost: the client does not.
        """
        if self._connection is not None and self._connection.lost:
            if not self._client._reconnects:
                self._connection.raise_if_lost()
            await self.open()

    async def free(self, *tensors: KeptTensor | w.Tensor, timeout: float | None = None) -> None:
        """Free tensors that stay in the daemon."""
        handles = [one.handle if isinstance(one, KeptTensor) else one.kept for one in tensors]
        await self._client.free_tensors(handles, timeout=timeout)

    def _named(self, inputs: Mapping[str, ArrayLike]) -> list[tuple[str, w.Tensor]]:
        if type(inputs) is not dict and not isinstance(inputs, Mapping):
            raise InvalidArgument(
                f"the inputs are a {type(inputs).__name__}",
                hint=f"pass a map by name; {inputs_text(self.inputs)}",
            )
        return [
            (name, tensor_of(value, self._find_input(name), name)) for name, value in inputs.items()
        ]

    def _find_input(self, name: str) -> TensorInfo | None:
        """Return the input of a name or an index, or None if the graph declares none at all."""
        inputs = self.inputs
        for info in inputs:
            if info.name == name:
                return info
        if name.isascii() and name.isdecimal() and int(name[:6]) < len(inputs):
            return inputs[int(name)]
        if self._declared is not _NOTHING_DECLARED:
            raise InvalidArgument(
                f"{self._model[:100]!r} has no input {name[:100]!r}", hint=inputs_text(inputs)
            )
        return None

    async def _compute(
        self,
        inputs: list[tuple[str, w.Tensor]],
        keep: Collection[str],
        places: Sequence[Place],
        keywords: SchedulingKeywords,
    ) -> dict[str, w.Tensor]:
        try:
            return await self._compute_once(inputs, keep, places, keywords)
        except SessionExpired:  # its contexts were unused for too long
            self._contexts.clear()
        except (InvalidArgument, NotFound):
            if self._connection is not None:  # the call may have gone to the next daemon
                self._connection.raise_if_lost()
            raise
        return await self._compute_once(inputs, keep, places, keywords)

    async def _compute_once(
        self,
        inputs: list[tuple[str, w.Tensor]],
        keep: Collection[str],
        places: Sequence[Place],
        keywords: SchedulingKeywords,
    ) -> dict[str, w.Tensor]:
        try:
            context = self._contexts.pop()
        except IndexError:
            context = await self._client.init_execution_context(
                require_open(self._graph),
                priority=keywords.get("priority"),
                queue_timeout=keywords.get("queue_timeout"),
                timeout=keywords.get("timeout"),
            )
        free = self._take_unused()
        try:
            result = await self._client.compute(
                context, inputs, keep=keep, places=places, free=free, **keywords
            )
        except BaseException:
            self._unused += free  # the daemon ignores those that it has freed
            await self._close_context(context)  # it may still compute
            raise
        if self._graph is not None and len(self._contexts) < CONTEXTS_MAX:
            self._contexts.append(context)
        else:
            await self._close_context(context)
        return dict(result.outputs)

    def _take_unused(self) -> list[int]:
        """Remove and return the handles of kept tensors that nothing refers to."""
        unused, taken = self._unused, list[int]()
        with suppress(IndexError):  # another thread may take them, too
            while unused and len(taken) < w.FREED_MAX:
                taken.append(unused.popleft())
        return taken

    async def _close_context(self, context: Context) -> None:
        if self._is_lost:
            return
        with self._client._driver.shield(), suppress(InferdError):
            await self._client.finalize_execution_context(context, timeout=CLOSE_S_MAX)


_NOTHING_DECLARED = DeclaredTensors((), ())
"""Of a model that takes tensors with any names."""


def _language_model(model: str) -> InvalidArgument:
    return InvalidArgument(
        f"{model[:100]!r} is a language model, which computes no tensors",
        hint="give it a prompt instead",
    )


def inputs_text(inputs: tuple[TensorInfo, ...]) -> str:
    """Return a hint that names a graph's inputs with their types and shapes."""
    if not inputs:
        return "it has no inputs"
    shown = ", ".join(map(str, inputs[:_SHOWN_MAX])) + (", …" if len(inputs) > _SHOWN_MAX else "")
    return f"its {'inputs are' if len(inputs) > 1 else 'input is'} {shown}"


def _declared_in(shown: ShownModel) -> DeclaredTensors | None:
    """Return the inputs and outputs in a model's description, or None if it has none."""
    facts: Mapping[str, Any] = shown if shown.get("inputs") is not None else shown["info"] or {}
    if not facts.get("inputs") and not facts.get("outputs"):
        return None
    try:
        return DeclaredTensors(*(_read(facts[key]) for key in ("inputs", "outputs")))
    except (msgspec.ValidationError, KeyError) as exc:
        raise ProtocolError(f"the inputs and outputs cannot be read: {exc}") from None


def _read(tensors: Any) -> tuple[TensorInfo, ...]:
    return msgspec.convert(tensors, tuple[TensorInfo, ...])

"""A guest's calls: wasi-nn with WasmEdge's behaviour, on the daemon's contexts.

Turns are computed as a whole, streamed to the guest's output, or pulled. Each function that makes
one returns an action for `Remote.call`, which repeats it when the daemon was restarted. The action
returns the error that ended the turn, if any. It also reads the output, which otherwise could get
lost between the turn and the guest's `get_output`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from ...backends.errors import (
    Busy,
    ContextFull,
    EndOfSequence,
    InferdError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SessionBusy,
    TooLarge,
)
from ...backends.model_encodings import encoding_of_bytes
from ...backends.tensors import TENSOR_TYPES, NamedTensor, Tensor, check_index, fits_index
from ...ipc.messages import METADATA_INDEX
from ...ipc.messages import TARGETS as TARGET_NUMBERS
from .graphs import GuestContext, GuestGraph, as_message, is_large
from .images import (
    FIRST_IMAGE_INDEX,
    IMAGE_BYTES_MAX,
    IMAGES_MAX,
    has_placeholder,
    is_image,
    take_image,
    with_images,
)
from .preloads import Preload, find_preload, load_preload
from .remote import Remote

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient
    from ...ipc.handles import Graph
    from ...ipc.names import Priority

TurnAction: TypeAlias = "Callable[[AsyncClient, int, float], Awaitable[InferdError | None]]"


def whole_turn(context: GuestContext, priority: Priority) -> TurnAction:
    """Return the action that computes a turn."""

    async def compute(client: AsyncClient, handle: int, timeout_s: float) -> InferdError | None:
        end = None
        try:
            await client.compute(handle, priority=priority, timeout=timeout_s)
        except ContextFull as exc:
            end = exc
        await _keep_output(context, client, handle)
        return end

    return compute


def streamed_turn(
    context: GuestContext, priority: Priority, write_text: Callable[[bytes], object]
) -> TurnAction:
    """Return the action that computes a turn and passes its text to *write_text*."""

    async def stream(client: AsyncClient, handle: int, timeout_s: float) -> InferdError | None:
        context.in_turn = True
        async with client.stream(handle, priority=priority, timeout=timeout_s) as pieces:
            async for piece in pieces:
                write_text(piece.encode())
                context.text = (context.text or b"") + piece.encode()
            full = pieces.metadata.get("stop_reason") == "context_full"
        await _keep_output(context, client, handle)
        return ContextFull("the context is full") if full else None

    return stream


def next_token(context: GuestContext, priority: Priority) -> TurnAction:
    """Return the action that computes the next token."""

    async def compute(client: AsyncClient, handle: int, timeout_s: float) -> InferdError | None:
        try:
            context.piece = await client.compute_single(
                handle, priority=priority, timeout=timeout_s
            )
        except (EndOfSequence, ContextFull) as exc:
            piece = await client.get_output_single(handle, 0)
            await _keep_output(context, client, handle)
            context.piece = piece
            return exc
        context.text = (context.text or b"") + context.piece
        return None

    return compute


def prompt_turn(
    prompt: str, priority: Priority
) -> Callable[[AsyncClient, int, float], Awaitable[str]]:
    """Return the action that answers a prompt of the prompt interface."""

    async def compute(client: AsyncClient, handle: int, timeout_s: float) -> str:
        return await client.prompt_compute(handle, prompt, priority=priority, timeout=timeout_s)

    return compute


async def _keep_output(context: GuestContext, client: AsyncClient, handle: int) -> None:
    text = await client.get_output(handle, 0)
    context.end_turn(text, await client.get_output(handle, METADATA_INDEX))


R = TypeVar("R")
CONTEXTS_MAX = 1000
GRAPHS_MAX = 1000
TARGETS = tuple(TARGET_NUMBERS)
"""The names of execution targets by number. The daemon refuses tpu and npu."""
_PRELOAD = b"preload:"


class Guest:
    """The graphs and contexts of one guest, by handles that count from 0 and are not used again.

    Each method raises the error whose number the guest gets. Calls for different contexts may run
    side by side. Without *write_text*, `stream-stdout` has no effect. *read_image* returns the
    image that the guest names with the key `image`; without it, the guest may name none.
    """

    def __init__(
        self,
        remote: Remote,
        *,
        preloads: Mapping[str, Preload],
        write_text: Callable[[bytes], object] | None = None,
        read_image: Callable[[str], Awaitable[bytes]] | None = None,
        contexts_max: int = CONTEXTS_MAX,
        graphs_max: int = GRAPHS_MAX,
    ):
        self.remote = remote
        self._preloads, self._write_text, self._read_image = preloads, write_text, read_image
        self._contexts_max, self._graphs_max = contexts_max, graphs_max
        self._graphs: dict[int, GuestGraph] = {}
        self._contexts: dict[int, GuestContext] = {}
        self._graphs_loaded = self._contexts_opened = 0
        # A cancelled call's place stays counted, because the daemon may have opened the object.
        self._graph_places = self._context_places = 0

    # Graphs.

    async def load(self, builders: list[bytes], target: int, encoding: str = "autodetect") -> int:
        """Load a model by the name in the first builder, or from the model's bytes there."""
        if not builders or target >= len(TARGETS):
            raise InvalidArgument(
                f"load with {len(builders)} builders and the target {target}",
                hint="name a model in the first builder; use target 0 (cpu), 1 (gpu) or 3 (auto)",
            )
        found = encoding_of_bytes(builders[0])
        # The weights of a graph of OpenVINO are its second builder.
        files = 2 if found == "openvino" else 1
        config = builders[files] if len(builders) > files else b""
        if not found:
            name = builders[0].rstrip(b"\0").removeprefix(_PRELOAD)
            return await self.load_by_name(name, config, TARGETS[target], encoding)
        if self._preloads:
            raise PermissionDenied(
                "the guest may not load a model of its own", hint="use the names of --nn-preload"
            )

        config, image = take_image(config)
        parts = [*builders[:files], config] if config else builders[:files]

        async def load_bytes(client: AsyncClient, timeout_s: float) -> Graph:
            return await client.load(list(parts), encoding, TARGETS[target], timeout=timeout_s)

        return await self._add_graph(GuestGraph(load_bytes, config, image))

    async def load_by_name(
        self, name: bytes, config: bytes = b"", target: str = "auto", encoding: str = "autodetect"
    ) -> int:
        """Load a model. Each call makes a graph of its own; the daemon shares the model."""
        try:
            preload = find_preload(self._preloads, name.decode(), target)
        except UnicodeDecodeError as exc:
            raise InvalidArgument(f"the name is not UTF-8: {exc}", hint="send UTF-8") from None
        config, image = take_image(config)

        async def load_named(client: AsyncClient, timeout_s: float) -> Graph:
            return await load_preload(client, preload, config, timeout_s, encoding)

        return await self._add_graph(GuestGraph(load_named, config, image))

    async def _add_graph(self, graph: GuestGraph) -> int:
        if self._graph_places >= self._graphs_max:
            raise Busy(f"the guest has {self._graphs_max} graphs", hint="unload some")
        self._graph_places += 1
        try:
            await self.remote.load_graph(graph)
        except InferdError:
            self._graph_places -= 1
            raise
        handle, self._graphs_loaded = self._graphs_loaded, self._graphs_loaded + 1
        self._graphs[handle] = graph
        return handle

    async def unload(self, handle: int, *, keep: bool = False) -> None:
        """End the lease on a model; the outputs of its contexts can still be read. With *keep* the
        model stays loaded for its `keep-alive`.
        """
        graph = self._graph(handle)
        for context in list(self._contexts.values()):
            if context.graph is graph:
                await self._detach(context)
        await self.remote.unload_graph(graph, keep=keep)
        del self._graphs[handle]
        self._graph_places -= 1
        graph.unloaded = True

    async def _detach(self, context: GuestContext) -> None:
        """Keep a context's output, and close the context in the daemon, where it counts as a
        session.
        """
        if context.tensors:
            context.keep_outputs(context.outputs or await self._outputs(context))
        else:
            if context.text is None:
                context.text = await self.remote.read_output(context, 0)
            if context.metadata is None:
                context.metadata = await self.remote.read_output(context, METADATA_INDEX)
        context.in_turn = False
        await self.remote.close_context(context)

    async def _outputs(self, context: GuestContext) -> list[bytes]:
        outputs: list[bytes] = []
        try:
            while True:
                outputs.append(await self.remote.read_output(context, len(outputs)))
        except NotFound:  # after the last one
            return outputs
        except TooLarge:
            await self._compute_large(context)
            return context.outputs

    # Contexts.

    async def init_execution_context(self, handle: int) -> int:
        """Open a context on a graph."""
        context = GuestContext(self._graph(handle))
        if self._context_places >= self._contexts_max:
            self._drop_detached_context()
        self._context_places += 1
        try:
            await self.remote.open_context(context)
        except InferdError:
            self._context_places -= 1
            raise
        handle, self._contexts_opened = self._contexts_opened, self._contexts_opened + 1
        self._contexts[handle] = context
        return handle

    def _drop_detached_context(self) -> None:
        """Drop the oldest context whose graph was unloaded; guests seldom close such contexts."""
        detached = (h for h, context in self._contexts.items() if context.graph.unloaded)
        oldest = next(detached, None)
        if oldest is None:
            raise Busy(f"the guest has {self._contexts_max} contexts", hint="finalize some")
        self._drop_context(oldest)

    async def finalize_execution_context(self, handle: int) -> None:
        """Close a context."""
        await self.remote.close_context(self._context(handle))
        self._drop_context(handle)

    def _drop_context(self, handle: int) -> None:
        del self._contexts[handle]
        self._context_places -= 1

    async def set_input(self, handle: int, index: int, tensor: Tensor) -> None:
        """Set parameters at index 1; at any other index, set the prompt and end a pulled turn. From
        index 2 on, an image is kept for the next prompts. Of a model that computes tensors, numbers
        are the input of the index, and of a graph all others, too.
        """
        context, data = self._live_context(handle), tensor.data
        numbers = context.graph.tensors and await self._is_tensor(context, index, tensor)
        if index == METADATA_INDEX and not numbers:
            data, image = take_image(data)
            await self.remote.set_input(context, METADATA_INDEX, data)
            context.note_settings(data)
            context.image = context.image if image is None else image
            return
        if index >= FIRST_IMAGE_INDEX and not numbers and is_image(data):
            self._keep_image(context, index, data)
            return
        if not numbers:
            data = await self._with_images(context, data)
        await self._end_turn(context)
        if numbers and is_large(tensor):
            await self._set_large_tensor(context, index, tensor)
            return
        place, value = (index, as_message(tensor)) if numbers else (0, data)
        try:
            await self.remote.set_input(context, place, value)
        except SessionBusy:  # a call that failed here may have begun a turn in the daemon
            await self.remote.clear_output(context)
            await self.remote.set_input(context, place, value)
        context.clear_output()
        if numbers:
            context.tensors[index] = tensor
        else:
            context.prompt, context.tensors = data, {}

    async def _is_tensor(self, context: GuestContext, index: int, tensor: Tensor) -> bool:
        """Return whether an input is one of the model's tensors, as the daemon decides it: all are
        those of a graph, except parameters. A model that declares none may take texts, too.
        """
        declared = (await self.remote.declared_tensors(context)).inputs
        if not declared:
            return tensor.holds_numbers
        is_text = index == METADATA_INDEX and tensor.type == TENSOR_TYPES["u8"]
        return not is_text or fits_index(declared, index, tensor)

    async def _set_large_tensor(self, context: GuestContext, index: int, tensor: Tensor) -> None:
        """Keep an input that no frame takes; it is sent with the computation."""
        declared = await self.remote.declared_tensors(context)
        if declared.inputs:  # else the model takes any
            check_index(declared.inputs, index, tensor)
        context.check_growth(index, tensor)
        context.clear_output()
        context.tensors[index] = tensor

    @staticmethod
    def _keep_image(context: GuestContext, index: int, data: bytes) -> None:
        others = [len(image) for at, image in context.images.items() if at != index]
        if len(others) >= IMAGES_MAX or sum(others) + len(data) > IMAGE_BYTES_MAX:
            raise TooLarge(
                f"the context has {len(others)} images of {sum(others)} bytes",
                hint=f"set at most {IMAGES_MAX} images of {IMAGE_BYTES_MAX} bytes together",
            )
        context.images[index] = data

    def set_images(self, handle: int, images: Sequence[bytes]) -> None:
        """Set the images for the next prompts, in place of all others that were set."""
        context = self._live_context(handle)
        context.images = {}
        for index, image in enumerate(images, FIRST_IMAGE_INDEX):
            self._keep_image(context, index, image)

    async def _with_images(self, context: GuestContext, prompt: bytes) -> bytes:
        """Return a prompt with the images of its context at their places."""
        if context.images:
            return with_images(prompt, [image for _, image in sorted(context.images.items())])
        path = context.graph.image if context.image is None else context.image
        if not path:
            return prompt
        if not has_placeholder(prompt) and b"<img " in prompt:
            return prompt  # with an image of its own
        if self._read_image is None:
            raise PermissionDenied(
                "the guest may not name images by their paths",
                hint="set the image's bytes as a tensor at index 2, or write it into the prompt",
            )
        return with_images(prompt, [await self._read_image(path)])

    async def _end_turn(self, context: GuestContext) -> None:
        """End a pulled turn, as WasmEdge does; otherwise the daemon would answer `SessionBusy`."""
        if context.in_turn:
            await self.remote.clear_output(context)
            context.clear_output()

    # Turns.

    async def compute(self, handle: int) -> None:
        """Compute the outputs of the tensors that were set, or a whole turn, whose text is printed
        if `stream-stdout` is set.

        :raises ContextFull: the context is full; the output so far can be read.
        """
        context = self._live_context(handle)
        await self._end_turn(context)
        if context.is_large:
            await self._noting_failure(context, self._compute_large(context))
            return
        if context.tensors:
            context.clear_output()
            call = self.remote.call(
                context, lambda c, h, s: c.compute(h, priority=self.remote.priority, timeout=s)
            )
            await self._noting_failure(context, call)
            return
        context.clear_output(None)
        write_text = self._write_text
        if write_text and context.wants("stream-stdout") and not context.wants("embedding"):
            await self._run(context, streamed_turn(context, self.remote.priority, write_text))
        else:
            await self._run(context, whole_turn(context, self.remote.priority))

    async def _compute_large(self, context: GuestContext) -> None:
        """Compute the outputs of the tensors that were set, which no frame or reply takes."""
        context.clear_output()
        declared = (await self.remote.declared_tensors(context)).inputs
        inputs = [
            (declared[index].name if index < len(declared) else str(index), tensor)
            for index, tensor in sorted(context.tensors.items())
        ]
        outputs = await self.remote.compute_tensors(context, inputs)
        context.keep_outputs([tensor.data for _, tensor in outputs])

    async def compute_tensors(
        self, handle: int, inputs: Sequence[NamedTensor]
    ) -> list[NamedTensor]:
        """Return the outputs of *inputs*, if the model computes tensors."""
        context = self._live_context(handle)
        await self._end_turn(context)
        return await self.remote.compute_tensors(context, inputs)

    def computes_tensors(self, handle: int) -> bool:
        """Return whether the model of a context computes tensors."""
        return self._context(handle).graph.tensors

    async def prompt_compute(self, handle: int, prompt: str) -> str:
        """Return the answer to a prompt that follows all earlier ones of the context."""
        context = self._live_context(handle)
        context.clear_output(None)
        action = prompt_turn(prompt, self.remote.priority)
        answer = await self._noting_failure(context, self.remote.call(context, action))
        context.note_answer(prompt, answer)
        return answer

    async def compute_single(self, handle: int) -> None:
        """Compute the next token.

        :raises EndOfSequence: the turn has ended.
        :raises ContextFull: the turn has ended because the context is full.
        """
        context = self._live_context(handle)
        if not context.in_turn:
            context.clear_output()
            context.in_turn = True
        await self._run(context, next_token(context, self.remote.priority))

    async def _run(self, context: GuestContext, action: TurnAction) -> None:
        end = await self._noting_failure(context, self.remote.call(context, action))
        if end is not None:
            context.failure = None if isinstance(end, EndOfSequence) else end.to_wire()
            raise end

    @staticmethod
    async def _noting_failure(context: GuestContext, turn: Awaitable[R]) -> R:
        try:
            return await turn
        except InferdError as exc:
            context.in_turn = False  # the next call begins the same prompt again
            context.failure = exc.to_wire()
            raise

    async def fini_single(self, handle: int) -> None:
        """End the turn and discard its output."""
        context = self._context(handle)
        if not context.graph.unloaded:
            await self.remote.clear_output(context)
        context.clear_output()

    async def get_output(self, handle: int, index: int) -> bytes:
        """Return the text of the turn so far, or at index 1 its metadata as JSON."""
        context = self._context(handle)
        if context.tensors and not (context.has_outputs or context.graph.unloaded):
            try:
                return await self.remote.read_output(context, index)
            except TooLarge:
                context.graph.has_large_outputs = True
                await self._compute_large(context)
        if index < len(context.outputs):
            return context.outputs[index]
        if index == METADATA_INDEX:
            metadata = context.metadata
            if metadata is None:
                metadata = await self.remote.read_output(context, METADATA_INDEX)
            return context.described(metadata, ("stream-stdout",) if self._write_text else ())
        if index:
            raise NotFound(f"output {index} does not exist", hint="0 is the text, 1 the metadata")
        if context.text is None:
            context.text = await self.remote.read_output(context, 0)
        return context.text

    async def get_output_single(self, handle: int, index: int) -> bytes:
        """Return the text of the last token, or at index 1 the metadata as JSON."""
        return await self.get_output(handle, index) if index else self._context(handle).piece

    async def close(self) -> None:
        """Close all contexts and graphs, and the client if it has replaced the caller's. Models
        stay loaded for their `keep-alive`.
        """
        for context in self._contexts.values():
            await self.remote.close_context(context)
        for graph in self._graphs.values():
            await self.remote.unload_graph(graph, keep=True)
        self._contexts.clear()
        self._graphs.clear()
        await self.remote.link.close()

    # Handles.

    def _graph(self, handle: int) -> GuestGraph:
        if handle not in self._graphs:
            raise InvalidArgument(f"graph {handle} does not exist", hint="load one")
        return self._graphs[handle]

    def _context(self, handle: int) -> GuestContext:
        if handle not in self._contexts:
            raise InvalidArgument(f"context {handle} does not exist", hint="open one on a graph")
        return self._contexts[handle]

    def _live_context(self, handle: int) -> GuestContext:
        """Return a context that can compute."""
        context = self._context(handle)
        if context.graph.unloaded:
            raise InvalidArgument(
                f"the graph of context {handle} was unloaded", hint="load the model again"
            )
        return context

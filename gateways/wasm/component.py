"""The component world `wasi:nn@0.2.0-rc-2024-10-28`, for components in wasmtime.

A context's inputs have names. Of a language model, an input of type U8 with one of
`PARAMETER_NAMES` has parameters as JSON; an image, of any name, belongs at a place of the prompt;
any other input is the prompt, of which there can be only one. The outputs are `output`, the text,
and `metadata`. A tensor model gets all inputs as they are; of a model of both kinds, inputs with
parameters are those of a turn.

wasmtime converts lists of bytes slowly, byte by byte.

`wasi:nn/prompt`, which the working group has sketched, has texts instead: a context of it keeps
prompts and answers, and its errors are texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...backends.errors import (
    ContextFull,
    InferdError,
    InvalidArgument,
    TooLarge,
    UnsupportedOperation,
)
from ...backends.tensors import TENSOR_TYPES, TYPE_NAMES, Tensor
from ...ipc.messages import METADATA_INDEX
from ..guests import CONTEXTS_MAX, TARGETS, ImageDirectory, Preload, is_image
from .dialects import check_component_encoding, component_code, component_text
from .guest import Guest
from .host_functions import ErrorSink, new_guest

if TYPE_CHECKING:
    from wasmtime.component import Linker

    from ...ipc.client import Client
    from ...ipc.names import Priority

VERSION = "0.2.0-rc-2024-10-28"
RESOURCES_MAX, TENSORS_BYTES_MAX = 10_000, 64 << 20
"""Resources of all kinds, and bytes of all tensors, that a guest may hold."""
PARAMETER_NAMES = ("metadata", "options", "config", "1")
TENSOR, ERROR, GRAPH, CONTEXT, PROMPTS = KINDS = (
    "tensor", "error", "graph", "graph-execution-context", "context",
)  # fmt: skip
_INTERFACES = {
    TENSOR: "tensor", ERROR: "errors", GRAPH: "graph", CONTEXT: "inference", PROMPTS: "prompt",
}  # fmt: skip
_FALLIBLE = {
    "load": True,
    "load-by-name": True,
    "[method]graph.init-execution-context": True,
    f"[method]{CONTEXT}.compute": False,
    "init": False,
    f"[method]{PROMPTS}.compute": True,
}
"""The functions whose type has an error case, and whether wasmtime needs a `Variant` for it because
both cases have the same Python type.
"""
_TEXT_ERRORS = ("init", f"[method]{PROMPTS}.compute")
Held = tuple[Any, ...]
"""The content of a resource: a tensor's dimensions, type and bytes; an error's code and text; the
handle of a graph; or the handles of a context's graph and of the context, of either kind.
"""


def add_component_to_linker(
    linker: Linker,
    client: Client,
    *,
    connect: Callable[[], Client] | None = None,
    preloads: Mapping[str, Preload] | None = None,
    priority: Priority = "normal",
    timeout: float | None = None,
    contexts_max: int = CONTEXTS_MAX,
    write_text: Callable[[bytes], object] | None = None,
    image_directories: Sequence[ImageDirectory] = (),
    on_error: ErrorSink | None = None,
) -> Guest:
    """Define the interfaces of `wasi:nn` in a component's *linker*, for one guest.

    Close the returned object when the guest has ended, because wasmtime does not drop the resources
    that a guest leaves. The parameters are those of `add_to_linker`.
    """
    from wasmtime.component import ResourceType

    guest = new_guest(
        client,
        connect=connect,
        preloads=preloads,
        priority=priority,
        timeout=timeout,
        contexts_max=contexts_max,
        write_text=write_text,
        image_directories=image_directories,
    )
    host = ComponentHost(guest, on_error)
    with linker.root() as root:
        for number, kind in enumerate(KINDS):
            with root.add_instance(f"wasi:nn/{_INTERFACES[kind]}@{VERSION}") as instance:
                instance.add_resource(kind, ResourceType.host(number), host.drop_resource(kind))
                for name, function in host.functions(kind).items():
                    instance.add_func(name, host.entry(name, function))
    return guest


class ComponentHost:
    """The resources of one guest, by kind and number, and the functions on them."""

    def __init__(self, guest: Guest, on_error: ErrorSink | None):
        self._guest, self._on_error = guest, on_error
        self._held: dict[str, dict[int, Held]] = {kind: {} for kind in KINDS}
        self._created = 0

    def functions(self, kind: str) -> dict[str, Callable[..., Any]]:
        """Return the functions of the interface with a *kind* of resource."""
        if kind == TENSOR:
            parts = {"dimensions": 0, "ty": 1, "data": 2}
            made = {"[constructor]tensor": lambda *tensor: self._add_resource(TENSOR, tensor)}
            return made | {f"[method]tensor.{n}": _part(i) for n, i in parts.items()}
        if kind == ERROR:
            return {"[method]error.code": _part(0), "[method]error.data": _part(1)}
        if kind == CONTEXT:
            return {f"[method]{CONTEXT}.compute": self._compute}
        if kind == PROMPTS:
            return {"init": self._prompt_init, f"[method]{PROMPTS}.compute": self._prompt_compute}
        init = "[method]graph.init-execution-context"
        return {init: self._init, "load": self._load, "load-by-name": self._load_by_name}

    def entry(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that wasmtime calls. It returns an error if the function's type has
        an error case; otherwise the guest traps. wasmtime passes on only its own exceptions, and
        loses others.
        """
        from wasmtime import WasmtimeError
        from wasmtime.component import Variant

        def call(store: Any, *values: Any) -> Any:
            self._guest.in_call = True
            try:
                arguments = [self._take(store, value) for value in values]
                try:
                    result, case = function(*arguments), "ok"
                except InferdError as exc:
                    if name not in _FALLIBLE:
                        raise
                    result, case = self._error(name, exc), "err"
            except BaseException as exc:
                self._guest.ended_by = exc
                raise WasmtimeError(str(exc) or type(exc).__name__) from exc
            finally:
                self._guest.in_call = False
            return Variant(case, result) if _FALLIBLE.get(name) else result

        return call

    def _error(self, name: str, error: InferdError) -> Any:
        self._guest.check_deadline()
        if self._on_error is not None:
            self._on_error(name, error)
        text = component_text(error)
        if name in _TEXT_ERRORS:
            return text
        return self._add_resource(ERROR, (component_code(error), text))

    def drop_resource(self, kind: str) -> Callable[[Any, int], None]:
        """Return the function that wasmtime calls when the guest drops a resource. It closes a
        context, and unloads a graph to which no other resource refers.
        """
        return lambda store, number: self._drop(kind, self._held[kind].pop(number, ()))

    def _drop(self, kind: str, held: Held) -> None:
        if not held or kind not in (GRAPH, CONTEXT, PROMPTS):
            return
        try:
            if kind != GRAPH:
                self._guest.finalize_execution_context(held[1])
            others = (other for k in (GRAPH, CONTEXT, PROMPTS) for other in self._held[k].values())
            if held[0] not in (other[0] for other in others):
                self._guest.unload(held[0], keep=True)
        except InferdError as exc:
            if self._on_error is not None:
                self._on_error(f"[resource-drop]{kind}", exc)

    def _take(self, store: Any, value: Any) -> Any:
        """Return *value* with the resources in place of their handles; one that the guest
        gives away is removed from those that it holds.
        """
        from wasmtime.component import ResourceAny

        if isinstance(value, list | tuple):
            return type(value)([self._take(store, item) for item in value])
        if not isinstance(value, ResourceAny):
            return value
        owned, handle = value.owned, value.to_host(store)  # `to_host` also ends the borrow
        held = self._held[KINDS[handle.type]]
        return held.pop(handle.rep) if owned else held[handle.rep]

    def _add_resource(self, kind: str, held: Held) -> Any:
        from wasmtime.component import ResourceHost

        size = sum(len(tensor[2]) for tensor in self._held[TENSOR].values())
        more = len(held[2]) if kind == TENSOR else 0
        if sum(map(len, self._held.values())) >= RESOURCES_MAX or size + more > TENSORS_BYTES_MAX:
            raise TooLarge(
                f"the guest holds {RESOURCES_MAX} resources or {size} bytes of tensors",
                hint="drop resources that are no longer needed",
            )
        self._created += 1
        self._held[kind][self._created] = held
        return ResourceHost.own(self._created, KINDS.index(kind))

    def _load(self, builders: list[bytes], encoding: str, target: str) -> Any:
        check_component_encoding(encoding)
        graph = self._guest.load(builders, TARGETS.index(target), encoding)
        return self._add_resource(GRAPH, (graph,))

    def _load_by_name(self, name: str) -> Any:
        return self._add_resource(GRAPH, (self._guest.load_by_name(name.encode()),))

    def _init(self, graph: Held) -> Any:
        context = self._guest.init_execution_context(graph[0])
        return self._add_resource(CONTEXT, (graph[0], context))

    def _compute(self, context: Held, inputs: list[tuple[str, Held]]) -> list[tuple[str, Any]]:
        parameters = any(_is_configuration(name, tensor) for name, tensor in inputs)
        if self._guest.computes_tensors(context[1]) and not parameters:
            tensors = [(name, _from_component(tensor)) for name, tensor in inputs]
            found = self._guest.compute_tensors(context[1], tensors)
            return [(n, self._add_resource(TENSOR, _to_component(t))) for n, t in found]
        images = [tensor[2] for _, tensor in inputs if is_image(tensor[2])]
        inputs = [(name, tensor) for name, tensor in inputs if not is_image(tensor[2])]
        prompts = [name for name, tensor in inputs if not _is_configuration(name, tensor)]
        if len(prompts) > 1:
            names = ", ".join(repr(name[:50]) for name in prompts[:8])
            raise InvalidArgument(f"{len(prompts)} tensors are prompts: {names}")
        self._guest.set_images(context[1], images)
        for name, tensor in inputs:
            index = METADATA_INDEX if _is_configuration(name, tensor) else 0
            self._guest.set_input(context[1], index, Tensor(tensor[2]))
        with suppress(ContextFull):  # the metadata has it as `stop_reason`
            self._guest.compute(context[1])
        outputs = {"output": 0, "metadata": METADATA_INDEX}
        texts = {name: self._guest.get_output(context[1], i) for name, i in outputs.items()}
        return [(n, self._add_resource(TENSOR, ([len(t)], "U8", t))) for n, t in texts.items()]

    def _prompt_init(self, graph: Held) -> Any:
        try:
            context = self._guest.init_execution_context(graph[0])
        except InferdError:
            self._drop(GRAPH, graph)  # the guest has given it away
            raise
        return self._add_resource(PROMPTS, (graph[0], context))

    def _prompt_compute(self, context: Held, prompt: str) -> str:
        return self._guest.prompt_compute(context[1], prompt)


def _is_configuration(name: str, tensor: Held) -> bool:
    return name in PARAMETER_NAMES and str(tensor[1]).upper() == "U8"


def _from_component(held: Held) -> Tensor:
    dimensions, kind, data = held
    return Tensor(data, tuple(dimensions), TENSOR_TYPES[kind.lower()])


def _to_component(tensor: Tensor) -> Held:
    """Return a tensor for the guest.

    :raises UnsupportedOperation: `wasi:nn` has no such type.
    """
    name = next((name for name, number in TENSOR_TYPES.items() if number == tensor.type), None)
    if name is None:
        raise UnsupportedOperation(
            f"a component has no tensors of the type {TYPE_NAMES.get(tensor.type, tensor.type)}",
            hint="use another model",
        )
    return list(tensor.dimensions), name.upper(), tensor.data


def _part(index: int) -> Callable[[Held], Any]:
    return lambda held: held[index]

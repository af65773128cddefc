"""Messages of calls that load models as graphs, and of the backend's configuration."""

from __future__ import annotations

from typing import Any

from .base import Map, Tensor

ENCODINGS = {
    "openvino": 0, "onnx": 1, "tensorflow": 2, "pytorch": 3, "tensorflowlite": 4, "autodetect": 5,
    "ggml": 6, "neuralspeed": 7, "burn": 8, "whisper": 9, "mlx": 10, "piper": 11, "chattts": 12,
    "openvinogenai": 13, "bitnet": 14,
}  # fmt: skip
"""Graph encodings by WasmEdge's numbers. Those of `backends.FILE_FORMATS` are loaded."""
TARGETS = {"cpu": 0, "gpu": 1, "tpu": 2, "auto": 3, "npu": 4}
"""Execution targets, in the order of their numbers; 0 to 3 are WasmEdge's."""


class LoadParams(Map):
    """`load`. `builders[0]` is a model's name or ``preload:NAME``. It is empty if `fd` is the index
    of a descriptor of the model's file. `builders[1]` may be parameters as JSON.
    """

    builders: list[bytes] = []
    """first: the model's [name](#load_by_name), or `preload:` and its name; absent or empty with
    `fd`. Second: parameters as JSON.
    """
    encoding: int | str = "autodetect"
    """A [graph encoding](#wasi-nn-numbers): that of the model (ggml, onnx,
    openvino, tensorflow or tensorflowlite), or autodetect; others are `InvalidEncoding`.
    """
    target: int | str = "auto"
    """An [execution target](#wasi-nn-numbers): cpu puts no layers on the GPU, gpu all that the
    configuration allows; tpu and npu are `UnsupportedOperation`.
    """
    fd: int = -1
    """0 or more: the model's file in a [descriptor](#descriptors); such a model has no projector,
    and reads only text.
    """
    weights: Tensor | None = None
    """With `fd` and the encoding openvino: the bytes of the model's weights (`NAME.bin`) in another
    descriptor, as a tensor; nil: it has none.
    """
    progress: bool = False
    """Send events while it loads."""


class LoadByNameParams(Map):
    """`load_by_name`; with `progress`, events report the progress of the load."""

    name: str
    """The model's name, as `models` lists it, or [another form of it](#names-of-models)."""
    progress: bool = False
    """Send events while it loads."""


class LoadByNameWithConfigParams(Map):
    """`load_by_name_with_config`; `config` is JSON text."""

    name: str
    """The model's name."""
    config: str = ""
    """Parameters as JSON; they hold for this graph only."""
    progress: bool = False
    """Send events while it loads."""


class GraphResult(Map):
    """A graph's handle, and the properties of its model."""

    graph: int
    """The handle."""
    model: str = ""
    """The model's name."""
    fingerprint: str = ""
    """Identifies the computation: file, slots, llama.cpp's build."""
    ctx_size: int = 0
    """Context size of this graph, in tokens."""
    slots: int = 0
    """Turns that the model's engine computes at the same time."""
    special_tokens: dict[str, Any] = {}
    """The special tokens that the vocabulary has: by name (`bos`, `eos`, `eot`, `sep`, `nl`,
    `pad`, `mask`, and to fill in the middle `fim-pre`, `fim-suf`, `fim-mid`, `fim-pad`,
    `fim-rep`, `fim-sep`) a map with `id` and `text`.
    """
    not_applied: dict[str, Any] = {}
    """Requested parameters that are not in force, with the values in force."""
    ignored: list[str] = []
    """Unknown keys."""
    adjusted: dict[str, str] = {}
    """Parameters out of their range, with the values used instead."""
    tensors: bool = False
    """Whether the model computes tensors; see [`compute`](#compute)."""


class ProgressEvent(Map):
    """The loaded fraction of a model, from 0 to 1."""

    progress: float
    """Progress of the load, or the copied fraction of the file, 0 … 1."""


class GraphParams(Map):
    """A call on a graph."""

    graph: int
    """The graph's handle."""


class UnloadParams(GraphParams):
    """`unload`: end the lease; with `keep` the model stays loaded for its `keep-alive`."""

    keep: bool = False
    """Keep the model loaded for as long as the daemon keeps an idle model."""


class InitBackendParams(Map):
    """`init_backend` with a configuration as JSON. Later graphs have wasi_nn_backend's defaults and
    this memory policy; keys that only the operator sets are ignored.
    """

    config: str = ""
    """JSON."""


class InitBackendResult(Map):
    """The keys that were ignored."""

    ignored: list[str] = []
    """The ignored keys."""

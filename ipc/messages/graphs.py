"""Messages of calls that load models as graphs, and of the backend's configuration."""

from __future__ import annotations

from typing import Any

from .base import Map

ENCODINGS = {
    "openvino": 0, "onnx": 1, "tensorflow": 2, "pytorch": 3, "tensorflowlite": 4, "autodetect": 5,
    "ggml": 6, "neuralspeed": 7, "burn": 8, "whisper": 9, "mlx": 10, "piper": 11, "chattts": 12,
    "openvinogenai": 13, "bitnet": 14,
}  # fmt: skip
"""Graph encodings by WasmEdge's numbers; only ggml and autodetect are loaded."""
TARGETS = {"cpu": 0, "gpu": 1, "tpu": 2, "auto": 3, "npu": 4}
"""Execution targets, in the order of their numbers; 0 to 3 are WasmEdge's."""


class LoadParams(Map):
    """`load`. `builders[0]` is a model's name or ``preload:NAME``. It is empty if `fd` is the index
    of a descriptor of the model's file. `builders[1]` may be parameters as JSON.
    """

    builders: list[bytes] = []
    encoding: int | str = "autodetect"
    target: int | str = "auto"
    fd: int = -1
    progress: bool = False


class LoadByNameParams(Map):
    """`load_by_name`; with `progress`, events report the progress of the load."""

    name: str
    progress: bool = False


class LoadByNameWithConfigParams(Map):
    """`load_by_name_with_config`; `config` is JSON text."""

    name: str
    config: str = ""
    progress: bool = False


class GraphResult(Map):
    """A graph's handle, and the properties of its model."""

    graph: int
    model: str = ""
    fingerprint: str = ""
    ctx_size: int = 0
    slots: int = 0
    special_tokens: dict[str, Any] = {}
    not_applied: dict[str, Any] = {}
    ignored: list[str] = []
    adjusted: dict[str, str] = {}
    tensors: bool = False


class ProgressEvent(Map):
    """The loaded fraction of a model, from 0 to 1."""

    progress: float


class GraphParams(Map):
    """A call on a graph."""

    graph: int


class UnloadParams(GraphParams):
    """`unload`: end the lease; with `keep` the model stays loaded for its `keep-alive`."""

    keep: bool = False


class InitBackendParams(Map):
    """`init_backend` with a configuration as JSON. Later graphs have wasi_nn_backend's defaults and
    this memory policy; keys that only the operator sets are ignored.
    """

    config: str = ""


class InitBackendResult(Map):
    """The keys that were ignored."""

    ignored: list[str] = []

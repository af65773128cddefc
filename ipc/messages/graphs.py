"""Loading: graphs, the models behind them, the backend's configuration."""

from __future__ import annotations

from typing import Any

from .base import Map

__all__ = (
    "ENCODINGS",
    "TARGETS",
    "GraphParams",
    "GraphResult",
    "InitBackendParams",
    "InitBackendResult",
    "LoadByNameParams",
    "LoadByNameWithConfigParams",
    "LoadParams",
    "ProgressEvent",
    "UnloadParams",
)

ENCODINGS = {
    "openvino": 0, "onnx": 1, "tensorflow": 2, "pytorch": 3, "tensorflowlite": 4, "autodetect": 5,
    "ggml": 6, "neuralspeed": 7, "burn": 8, "whisper": 9, "mlx": 10, "piper": 11, "chattts": 12,
    "openvinogenai": 13, "bitnet": 14,
}  # fmt: skip
"""Graph encodings by WasmEdge's numbers; only ggml and autodetect are loaded."""
TARGETS = {"cpu": 0, "gpu": 1, "tpu": 2, "auto": 3, "npu": 4}
"""Execution targets; 0 to 3 are WasmEdge's numbers."""


class LoadParams(Map):
    """`load`. A builder is a model's name, ``preload:NAME``, or, with `fd`, absent: the model is
    then the file behind that descriptor. `builders[1]` may hold metadata JSON.
    """

    builders: list[bytes] = []
    encoding: int | str = "autodetect"
    target: int | str = "auto"
    fd: int = -1
    progress: bool = False


class LoadByNameParams(Map):
    """`load_by_name`; with `progress`, events tell how far the load is."""

    name: str
    progress: bool = False


class LoadByNameWithConfigParams(Map):
    """`load_by_name_with_config`; `config` is a JSON text."""

    name: str
    config: str = ""
    progress: bool = False


class GraphResult(Map):
    """A graph's handle, and what it stands for."""

    graph: int
    model: str = ""
    fingerprint: str = ""
    ctx_size: int = 0
    slots: int = 0
    not_applied: dict[str, Any] = {}
    ignored: list[str] = []


class ProgressEvent(Map):
    """How far a load is, 0 … 1."""

    progress: float


class GraphParams(Map):
    """A call on a graph."""

    graph: int


class UnloadParams(Map):
    """`unload`; with `keep` the lease ends, and the model stays for as long as the daemon keeps
    an idle one.
    """

    graph: int
    keep: bool = False


class InitBackendParams(Map):
    """`init_backend`: a JSON configuration; an operator's keys in it are ignored."""

    config: str = ""


class InitBackendResult(Map):
    """The keys that were ignored."""

    ignored: list[str] = []

"""The protocols of models, the engines that run them (`echo`, `llama`, `onnx`), and the error tree.

This package does not depend on queues, sessions or sockets. To add an engine, write a package whose
models pass `tests/backends/test_contract.py`, and add its row to `ENGINES`.
"""

from __future__ import annotations

import importlib
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import UnsupportedOperation

if TYPE_CHECKING:
    from pathlib import Path

    from .base import (
        CompiledGrammar,
        Computation,
        DraftModel,
        GraphModel,
        LanguageModel,
        Model,
        ModelInfo,
        Rendering,
        Sampler,
        TensorModel,
    )
    from .batch import Chunk
    from .embedder import EmbedInfo, EmbedSpec
    from .errors import InferdError
    from .memory import Device, MemoryEstimator, MemoryNeed
    from .model_spec import AdapterInfo, AdapterSpec, LoadProgress, ModelSpec, Shape
    from .params import SamplingParams
    from .tensors import DeclaredTensors

__all__ = (
    "AdapterInfo",
    "AdapterSpec",
    "Chunk",
    "CompiledGrammar",
    "Computation",
    "Device",
    "DraftModel",
    "EmbedInfo",
    "EmbedSpec",
    "GraphModel",
    "InferdError",
    "LanguageModel",
    "MemoryNeed",
    "Model",
    "ModelInfo",
    "ModelSpec",
    "MemoryEstimator",
    "Rendering",
    "Sampler",
    "SamplingParams",
    "Shape",
    "TensorModel",
    "load_model",
    "declared_tensors",
    "estimate_memory",
)

_MODULES = ("base", "batch", "embedder", "errors", "memory", "model_spec", "params")
"""Imported when one of their names is first used, because the client needs only the error tree."""


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Engine(NamedTuple):
    """A backend: the format of its model files, or an empty text if its models have no file; the
    places of its functions, imported at the first use because `echo` runs without llama.cpp; the
    program of its encoder process, if it has one; the name of its encoding in wasi-nn; the extra
    that installs it; whether its models are graphs, which have no language; and the place of the
    function that returns the `DeclaredTensors` of a graph's file without an engine, if it has one.
    """

    file_format: str
    load: str
    estimate: str
    encoder: str
    encoding: str = "ggml"
    extra: str = "daemon"
    graphs: bool = False
    declared: str = ""


ENGINES = {
    "llama": Engine(
        "gguf",
        "llama.loading.loader:load_llama",
        "llama.loading.memory_estimate:LlamaMemoryEstimator",
        "llama.media.program",
    ),
    "echo": Engine(
        *("", "echo.model:load_echo", "echo.options:EchoMemoryEstimator", "echo.media_program")
    ),
    "onnx": Engine(
        *("onnx", "onnx.model:load_onnx", "onnx.memory:OnnxMemoryEstimator", ""),
        encoding="onnx",
        extra="onnx",
        graphs=True,
        declared="onnx.header:declared_tensors",
    ),
}
"""By the name of the backend in the configuration."""
FILE_SUFFIXES = {f".{engine.file_format}": n for n, engine in ENGINES.items() if engine.file_format}
"""The backends by the ends of their files' names."""


def backend_of_file(name: str) -> str:
    """Return the backend of the model in a file of this *name*."""
    found = (n for suffix, n in FILE_SUFFIXES.items() if name.lower().endswith(suffix))
    return next(found, "llama")


def load_model(spec: ModelSpec, progress: LoadProgress, *, renders: bool = False) -> Model:
    """Load the model that *spec* names, in the calling thread. With *renders*, the process that
    rendering needs is started during the load; otherwise the first `render` starts it.

    :raises UnsupportedOperation: the backend is unknown, not installed, or cannot run this kind of
        model.
    :raises InvalidArgument: an option of *spec* is wrong.
    :raises LoadFailed: the file is missing, unreadable, damaged or of an unknown kind.
    :raises OutOfMemory: the context does not fit in memory.
    :raises Cancelled: *progress* returned False.
    """
    model: Model = _found(spec, "load")(spec, progress, renders=renders)
    return model


def declared_tensors(backend: str, path: Path) -> DeclaredTensors:
    """Return the inputs and outputs of the graph in a file, whose engine has a function for it.

    :raises LoadFailed: the file cannot be read, or is damaged.
    """
    read = resolve_name(f"{__name__}.{ENGINES[backend].declared}")
    found: DeclaredTensors = read(path)
    return found


def estimate_memory(spec: ModelSpec) -> MemoryEstimator:
    """Open the model that *spec* names without its weights, to estimate its memory.

    :raises InferdError: as `load_model` describes.
    """
    estimator: MemoryEstimator = _found(spec, "estimate")(spec)
    return estimator


def _found(spec: ModelSpec, function: str) -> Any:
    """Return a function of the spec's engine by its name in `Engine`."""
    if spec.backend not in ENGINES:
        names = " or ".join(ENGINES)
        raise UnsupportedOperation(f"unknown backend {spec.backend!r}", hint=f"use {names}")
    try:
        return resolve_name(f"{__name__}.{getattr(ENGINES[spec.backend], function)}")
    except (ImportError, OSError, RuntimeError) as exc:
        from .library import install_command

        extra = ENGINES[spec.backend].extra
        raise UnsupportedOperation(
            f"the backend {spec.backend!r} cannot be used here: {exc}",
            hint=install_command(extra),
        ) from exc

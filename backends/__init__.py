"""The protocols of models, the engines that run them (`ENGINES`), and the error tree.

This package does not depend on queues, sessions or sockets. To add an engine, write a package whose
models pass `tests/backends/test_contract.py`, and add its row to `ENGINES`, and its formats to
`FILE_FORMATS`.
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
    """A backend: the places of its functions, imported at the first use because `echo` runs without
    llama.cpp; the program of its encoder process, if it has one; the extra that installs it;
    whether its models are graphs, which have no language; and the place of the function that
    returns the `DeclaredTensors` of a graph's file without an engine, if it has one; and that of
    the function that checks whether the engine has the device to which a graph's spec is set.

    The memory of a graph's load is estimated as *weights_factor* times the bytes of its files.
    """

    load: str
    estimate: str
    encoder: str = ""
    extra: str = "daemon"
    graphs: bool = False
    declared: str = ""
    check_device: str = ""
    weights_factor: float = 1.0


ENGINES = {
    "llama": Engine(
        "llama.loading.loader:load_llama",
        "llama.loading.memory_estimate:LlamaMemoryEstimator",
        "llama.media.program",
    ),
    "echo": Engine(
        "echo.model:load_echo", "echo.options:EchoMemoryEstimator", "echo.media_program"
    ),
    "onnx": Engine(
        "onnx.model:load_onnx",
        "onnx.header:OnnxMemoryEstimator",
        extra="onnx",
        graphs=True,
        declared="onnx.header:declared_tensors",
        check_device="onnx.model:check_device",
        # A float32 network of 256 MiB took 266 MiB, and 329 MiB at the peak.
        weights_factor=1.3,
    ),
    "litert": Engine(
        "litert.model:load_litert",
        "litert.header:LiteRtMemoryEstimator",
        extra="litert",
        graphs=True,
        declared="litert.header:declared_tensors",
        # The file is mapped, and the packed weights lie beside it.
        weights_factor=2.0,
    ),
    "openvino": Engine(
        "openvino.model:load_openvino",
        "openvino.header:OpenVinoMemoryEstimator",
        extra="openvino",
        graphs=True,
        declared="openvino.header:declared_tensors",
        check_device="openvino.model:check_device",
        # A float32 network of 256 MiB took 542 MiB after the first run, with the packed weights.
        weights_factor=2.1,
    ),
}
"""By the name of the backend in the configuration."""


class FileFormat(NamedTuple):
    """A format of model files: the end of their paths, the name of its encoding in wasi-nn, and the
    backends that run it, the default one first. The path of a folder's file ends with the file's
    whole name, after a slash.
    """

    suffix: str
    encoding: str
    backends: tuple[str, ...]


FILE_FORMATS = (
    FileFormat(".gguf", "ggml", ("llama",)),
    FileFormat(".onnx", "onnx", ("onnx", "openvino")),
    FileFormat(".tflite", "tensorflowlite", ("litert",)),
    FileFormat(".xml", "openvino", ("openvino",)),
    FileFormat("/saved_model.pb", "tensorflow", ("openvino",)),
)
FILE_SUFFIXES = tuple(one.suffix for one in FILE_FORMATS)
_GGUF = FILE_FORMATS[0]


def format_of_file(name: str) -> FileFormat:
    """Return the format of the model in a file of this *name*, or path: GGUF, unless it ends as
    others.
    """
    path = f"/{name.lower()}"
    return next((one for one in FILE_FORMATS if path.endswith(one.suffix)), _GGUF)


def format_of_backend(backend: str) -> FileFormat:
    """Return the format that *backend* runs by default; GGUF if its models have no file."""
    return next((one for one in FILE_FORMATS if one.backends[0] == backend), _GGUF)


def suffixes_of_backend(backend: str) -> list[str]:
    """Return the ends of the names of files that *backend* runs."""
    return [one.suffix for one in FILE_FORMATS if backend in one.backends]


def backend_of_file(name: str) -> str:
    """Return the default backend of the model in a file of this *name*."""
    return format_of_file(name).backends[0]


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
    model: Model = function_of(spec.backend, "load")(spec, progress, renders=renders)
    return model


def declared_tensors(backend: str, path: Path) -> DeclaredTensors | None:
    """Return the inputs and outputs of the graph in a file, whose engine has a function for it, or
    None if they are known once it is loaded.

    :raises LoadFailed: the file cannot be read, or is damaged.
    """
    read = resolve_name(f"{__name__}.{ENGINES[backend].declared}")
    found: DeclaredTensors | None = read(path)
    return found


def estimate_memory(spec: ModelSpec) -> MemoryEstimator:
    """Open the model that *spec* names without its weights, to estimate its memory.

    :raises InferdError: as `load_model` describes.
    """
    estimator: MemoryEstimator = function_of(spec.backend, "estimate")(spec)
    return estimator


def function_of(backend: str, function: str) -> Any:
    """Return a function of a backend by its name in `Engine`, which imports the engine.

    :raises UnsupportedOperation: the backend is unknown or not installed.
    """
    if backend not in ENGINES:
        names = " or ".join(ENGINES)
        raise UnsupportedOperation(f"unknown backend {backend!r}", hint=f"use {names}")
    try:
        return resolve_name(f"{__name__}.{getattr(ENGINES[backend], function)}")
    except (ImportError, OSError, RuntimeError) as exc:
        from .library import install_command

        raise UnsupportedOperation(
            f"the backend {backend!r} cannot be used here: {exc}",
            hint=install_command(ENGINES[backend].extra),
        ) from exc

"""The protocols of models, the engines `echo` and `llama` that run them, and the error tree.

This package does not depend on queues, sessions or sockets. To add an engine, write a package whose
models pass `tests/backends/test_contract.py`, and add its row to `ENGINES`.
"""

from __future__ import annotations

import importlib
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import UnsupportedOperation

if TYPE_CHECKING:
    from .base import (
        CompiledGrammar,
        DraftModel,
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

__all__ = (
    "AdapterInfo",
    "AdapterSpec",
    "Chunk",
    "CompiledGrammar",
    "Device",
    "DraftModel",
    "EmbedInfo",
    "EmbedSpec",
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
    places of its functions, imported at the first use because `echo` runs without llama.cpp; and
    the program of its encoder process.
    """

    file_format: str
    load: str
    estimate: str
    encoder: str


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
}
"""By the name of the backend in the configuration."""


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

        raise UnsupportedOperation(
            f"the backend {spec.backend!r} cannot be used here: {exc}",
            hint=install_command("daemon"),
        ) from exc

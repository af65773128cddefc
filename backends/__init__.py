"""The `Model` protocol, its backends `echo` and `llama`, and the error tree.

This package does not depend on queues, sessions or sockets. To add a backend, write a class that
passes `tests/backends/test_contract.py` and add it to `load_model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedOperation

if TYPE_CHECKING:
    from .adapter_keys import AdapterInfo, AdapterSpec
    from .base import Message, Model, ModelInfo, Rendering, Sampler, TokenProbs
    from .batch import Chunk
    from .embedder import Embedder, EmbedInfo, EmbedSpec
    from .errors import InferdError
    from .memory_need import Device, MemoryEstimator, MemoryNeed
    from .model_spec import LoadProgress, ModelSpec, Shape
    from .params import SamplingParams

__all__ = (
    "AdapterInfo",
    "AdapterSpec",
    "Chunk",
    "Device",
    "EmbedInfo",
    "EmbedSpec",
    "Embedder",
    "InferdError",
    "LoadProgress",
    "MemoryNeed",
    "Message",
    "Model",
    "ModelInfo",
    "ModelSpec",
    "MemoryEstimator",
    "Rendering",
    "Sampler",
    "SamplingParams",
    "TokenProbs",
    "Shape",
    "load_model",
    "estimate_memory",
)

_MODULES = (
    "adapter_keys", "base", "batch", "embedder", "errors", "memory_need", "model_spec", "params",
)  # fmt: skip
"""Imported when one of their names is first used: the client needs the error tree alone."""


def __getattr__(name: str) -> Any:
    for module in _MODULES if name in __all__ else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_model(spec: ModelSpec, progress: LoadProgress) -> Model:
    """Load the model that *spec* names, in the calling thread.

    :raises LoadFailed: the file is missing, unreadable, damaged or of an unknown kind.
    :raises Cancelled: *progress* returned False.
    """
    if spec.backend == "echo":
        from .echo.model import load_echo

        return load_echo(spec, progress)
    if spec.backend == "llama":
        from .llama import load_llama

        return load_llama(spec, progress)
    raise _unknown(spec)


def estimate_memory(spec: ModelSpec) -> MemoryEstimator:
    """Open the model that *spec* names without loading it, to estimate its memory.

    :raises LoadFailed: the file is missing, unreadable, damaged or of an unknown kind.
    """
    if spec.backend == "echo":
        from .echo.memory_estimate import EchoMemoryEstimator

        return EchoMemoryEstimator(spec)
    if spec.backend == "llama":
        from .llama import estimate_llama

        return estimate_llama(spec)
    raise _unknown(spec)


def _unknown(spec: ModelSpec) -> UnsupportedOperation:
    return UnsupportedOperation(f"unknown backend {spec.backend!r}", hint="use llama or echo")

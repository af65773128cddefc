"""GGUF models through llama.cpp, using only the low-level bindings of llama-cpp-python.

`model` has the `Model`; `loading` checks and opens files and estimates memory, `kv` owns contexts,
`sampling` sampler chains, `text` vocabularies and chat templates, `lora` adapters, `llama_log`
llama.cpp's log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UnsupportedOperation
from ..model_spec import LoadProgress, ModelSpec

if TYPE_CHECKING:
    from .loading.memory_estimate import LlamaMemoryEstimator
    from .model import LlamaModel

__all__ = ("load_llama", "estimate_llama")


def load_llama(spec: ModelSpec, progress: LoadProgress) -> LlamaModel:
    """Load the GGUF model that *spec* names, in the calling thread.

    :raises UnsupportedOperation: llama.cpp is not installed, or cannot run this kind of model.
    :raises InvalidArgument: an option of *spec* is wrong.
    :raises LoadFailed: the file is missing, unreadable, damaged or of an unknown kind.
    :raises OutOfMemory: there is no memory for the context.
    :raises Cancelled: *progress* returned False.
    """
    try:
        from .loading.loader import load
    except (ImportError, OSError, RuntimeError) as exc:
        raise _unusable(exc) from exc
    return load(spec, progress)


def estimate_llama(spec: ModelSpec) -> LlamaMemoryEstimator:
    """Open the GGUF model that *spec* names without its weights, to estimate its memory.

    :raises InferdError: as `load_llama` describes.
    """
    try:
        from .loading.memory_estimate import LlamaMemoryEstimator
    except (ImportError, OSError, RuntimeError) as exc:
        raise _unusable(exc) from exc
    return LlamaMemoryEstimator(spec)


def _unusable(error: Exception) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"llama.cpp cannot be used here: {error}", hint="pip install 'inferd[daemon]'"
    )

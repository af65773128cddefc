"""GGUF models through llama.cpp, by the low-level bindings of llama-cpp-python alone.

`load` makes a model from a file, `model` is the `Model`; `context` owns the KV state, `sampling`
the sampler chains, `vocab` the tokens, `template` the chat template, `gguf_file` the checks that
a file passes before llama.cpp sees it, `log` what llama.cpp says, `memory` what a model would take.
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

    :raises UnsupportedOperation: llama.cpp is not installed, or does not run this kind of model.
    :raises InvalidArgument: an option of *spec* is wrong.
    :raises LoadFailed: the file is missing, unreadable, damaged or of an unknown kind.
    :raises OutOfMemory: there is no memory for the context.
    :raises Cancelled: *progress* answered False.
    """
    try:
        from .loading.loader import load
    except (ImportError, OSError, RuntimeError) as exc:
        raise _unusable(exc) from exc
    return load(spec, progress)


def estimate_llama(spec: ModelSpec) -> LlamaMemoryEstimator:
    """Look at the GGUF model that *spec* names without loading it.

    :raises InferdError: what `load_llama` raises.
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

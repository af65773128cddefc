"""The NextN layers of a load: the checks of its file and of the engine, and their context."""

from __future__ import annotations

from typing import Any

from llama_cpp import llama_cpp as lib

from ...base import WHOLE_KINDS, KvKind
from ...errors import InvalidArgument, UnsupportedOperation
from ...gguf.facts import nextn_refusal
from ...model_spec import ModelSpec
from .gguf_check import GgufFile

HINT = 'leave out speculation = "mtp" for this model, or use a file that has its NextN layers'
CTX_TYPE_MTP = 1
"""`LLAMA_CONTEXT_TYPE_MTP`."""
BATCH_MAX = 256
"""The most tokens of a step of NextN layers, which have the hidden states of as many at most."""


def nextn_calls() -> Any:
    """Return the module of llama.cpp's calls for NextN layers, which its public header lacks.

    :raises UnsupportedOperation: the engine does not have them.
    """
    try:
        from llama_cpp import llama_cpp_ext
    except (AttributeError, ImportError):
        raise UnsupportedOperation(
            "the installed llama.cpp has no calls for NextN layers",
            hint='leave out speculation = "mtp", or install the engine that inferd was made with',
        ) from None
    return llama_cpp_ext


def check_nextn(spec: ModelSpec, file: GgufFile, name: str) -> None:
    """Check that the NextN layers in *file* can draft, if *spec* requests it.

    :raises UnsupportedOperation: the file or the engine lacks something for it.
    :raises InvalidArgument: the model has a draft model as well.
    """
    if not spec.nextn:
        return
    if spec.draft_model:
        raise InvalidArgument(
            f'{name!r} has a draft model and speculation = "mtp": one of them can draft',
            hint='leave out draft-model, or set speculation = "draft"',
        )
    nextn_calls()
    if reason := nextn_refusal(file.values, file.tensors):
        raise UnsupportedOperation(f"{name!r} cannot draft with NextN layers: {reason}", hint=HINT)


def check_nextn_drafts(name: str, kind: KvKind, rollback: int) -> None:
    """Check that rejected drafts can be removed from KV states of a *kind*. It does not suffice to
    go back to before the step: the layers would lack the hidden states of the accepted tokens.

    :raises UnsupportedOperation: they cannot.
    """
    if kind in WHOLE_KINDS and not rollback:
        reason = "its recurrent state cannot be cut back to the accepted tokens"
        raise UnsupportedOperation(f"no drafts with {name!r}: {reason}", hint=HINT)


def nextn_params(params: Any, slots: int) -> Any:
    """Turn the *params* of a model's context into those of the context of its NextN layers."""
    params.ctx_type = CTX_TYPE_MTP
    params.n_batch = min(params.n_batch, BATCH_MAX)
    params.n_ubatch = min(params.n_ubatch, params.n_batch)
    params.n_outputs_max, params.n_rs_seq = slots, 0
    return params


def state_width(model: Any) -> int:
    """Return the numbers of a hidden state of a llama.cpp *model*."""
    return int(lib.llama_model_n_embd_out(model))

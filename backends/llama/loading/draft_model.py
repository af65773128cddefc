"""The draft model of a load: its spec, the checks of its file, and its context."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib
from msgspec.structs import replace

from ...base import KvKind, no_drafts
from ...engine_options import EngineOptions
from ...errors import LoadFailed, UnsupportedOperation
from ...gguf.header import DamagedHeader
from ...gguf.vocabulary import read_vocabulary, vocabulary_mismatch
from ...model_spec import ModelSpec
from ..llama_log import LogRing
from .opening import (
    context_params,
    ctx_size_of,
    decoder_start_token,
    kept_bytes_of,
    name_of,
    open_context,
)

HINT = "name a smaller model of the same family by draft-model, or leave draft-model out"
_PASSED_ON = frozenset(("mmap", "mlock", "threads-batch"))
"""The options of the model that hold for its draft model. The others are about the model's file, or
depend on the sizes of its heads.
"""


def draft_spec(spec: ModelSpec, model: Any) -> ModelSpec:
    """Return the spec of the draft model of *spec*, whose llama.cpp *model* is open: as many slots
    and tokens, and its layers on the same devices.
    """
    return replace(
        spec,
        path=spec.draft_model,
        draft_model="",
        nextn=False,
        fd=-1,
        ctx_size=ctx_size_of(spec, model),
        logits_per_slot=1,
        tensor_split=(),
        chat_template="",
        chat_template_file="",
        tool_format="",
        mmproj="",
        adapters=(),
        options={name: value for name, value in spec.options.items() if name in _PASSED_ON},
    )


def check_draft_model(spec: ModelSpec) -> None:
    """Check, by the headers of both files, that the draft model has the model's vocabulary.

    :raises LoadFailed: a file cannot be read, or the vocabularies differ.
    :raises UnsupportedOperation: the model was passed as a descriptor.
    """
    if spec.fd >= 0:
        raise UnsupportedOperation("a model that is passed as a file has no draft model", hint=HINT)
    sides = []
    for path in (spec.path, spec.draft_model):
        try:
            sides.append(read_vocabulary(Path(path)))
        except (OSError, DamagedHeader) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else exc
            raise LoadFailed(
                f"{os.path.basename(path)!r} cannot be read: {reason}",
                hint="check the path" if path == spec.path else HINT,
            ) from None
    if problem := vocabulary_mismatch(*sides):
        draft = os.path.basename(spec.draft_model)
        raise LoadFailed(
            f"{draft!r} cannot draft for {name_of(spec)!r}: {problem}",
            hint=HINT,
            data={"draft_model": draft},
        )


def check_draftable(spec: ModelSpec, model: Any) -> None:
    """Check that the states of a llama.cpp *model*, which drafts or has a draft model, can be cut
    back, or can go back to earlier ones.

    :raises UnsupportedOperation: they cannot.
    """
    whole = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
    encodes, goes_back = decoder_start_token(model) is not None, kept_bytes_of(spec.slots, model)
    kind: KvKind = "recurrent" if whole else "plain"
    if reason := no_drafts(kind, encodes=encodes, goes_back=goes_back > 0):
        raise UnsupportedOperation(f"no drafts with {name_of(spec)!r}: {reason}", hint=HINT)


def draft_context_params(spec: ModelSpec, options: EngineOptions, model: Any) -> Any:
    """Return llama.cpp's parameters of the context of a draft model. It goes back by several steps,
    and llama.cpp rolls recurrent states back by the tokens of one.
    """
    params = context_params(spec, options, model)
    params.n_rs_seq = 0
    return params


def open_draft_context(spec: ModelSpec, params: Any, model: Any, log: LogRing) -> Any:
    """Return a new context of a draft model; the caller frees it.

    :raises UnsupportedOperation: the model only makes embeddings.
    """
    context = open_context(spec, params, model, log)
    if not lib.llama_get_memory(context):
        lib.llama_free(context)
        raise UnsupportedOperation(f"{name_of(spec)!r} only makes embeddings", hint=HINT)
    return context

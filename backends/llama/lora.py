"""The adapters of one model: checks of their files before llama.cpp reads them, and their use.

llama.cpp checks only the first two dimensions of the matrices. A type that it cannot multiply, a
third dimension, an entry of an unexpected type, or embeddings that the output layer shares would
end the process, at the load or in the first step.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from ..encoder_prompts import ENCODER_DECODERS
from ..errors import InvalidArgument, LoadFailed, UnsupportedOperation
from ..model_spec import AdapterInfo, AdapterSpec, split_key
from .llama_log import capture
from .loading.gguf_check import GgufFile, GgufTensor, open_model_file, read_gguf
from .loading.opening import c_file

_CONVERT = "convert it for this model with llama.cpp's convert_lora_to_gguf.py"
_FLOAT32_ENTRY = 6
_ALPHA, _INVOCATION = "adapter.lora.alpha", "adapter.alora.invocation_tokens"
_A, _B = ".lora_a", ".lora_b"
_NORM = "_norm.weight"
"""llama.cpp ignores the norms in an adapter."""
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_BF16 = 30
"""`GGML_TYPE_BF16`, which the library does not name."""
_EXPONENTS: dict[int, tuple[np.dtype[Any], int]] = {
    lib.GGML_TYPE_F32: (np.dtype("<u4"), 0x7F80_0000),
    lib.GGML_TYPE_F16: (np.dtype("<u2"), 0x7C00),
    _BF16: (np.dtype("<u2"), 0x7F80),
}
"""By type of matrix, the type of its numbers as unsigned integers, and the bits of their exponents.
A NaN or an infinity has all of these set.
"""


def check_adapter(adapter: GgufFile, model: GgufFile, name: str) -> None:
    """Check by the headers of both files that an adapter fits the model.

    :raises LoadFailed: the file is not an adapter, is damaged, or was made for another model.
    :raises UnsupportedOperation: this kind of adapter cannot be run.
    """
    _check_entries(adapter, model, name)
    architecture = str(model.values.get("general.architecture"))
    pairs = list(_pairs(adapter, name))
    if not pairs:
        raise _unfit(name, "has no matrices")
    for target, a, b in pairs:
        if target not in model.tensors:
            raise _unfit(name, f"changes {target!r}, which the model does not have")
        _check_pair(name, target, a, b, model)
        if not is_adapted(target, architecture):
            reason = (
                f"changes {target!r}, which llama.cpp uses without adapters in {architecture!r}"
            )
            raise _unsupported(name, reason, "train it on other weights of the model")


def _unfit(name: str, reason: str) -> LoadFailed:
    return LoadFailed(f"the adapter {name!r} {reason}", hint=_CONVERT)


def _unsupported(name: str, reason: str, hint: str = "use a LoRA adapter") -> UnsupportedOperation:
    return UnsupportedOperation(f"the adapter {name!r} {reason}", hint=hint)


def _check_entries(adapter: GgufFile, model: GgufFile, name: str) -> None:
    values = adapter.values
    if model.values.get("general.architecture") in ENCODER_DECODERS:
        reason = "is for an encoder-decoder: inferd runs no adapters on such models"
        raise _unsupported(name, reason, "merge it into the weights of the model")
    if values.get("general.type") != "adapter":
        kind = values.get("general.type", "model")
        raise LoadFailed(f"{name!r} is not an adapter but of the type {kind!r}", hint=_CONVERT)
    if values.get("adapter.type") != "lora":
        raise _unsupported(name, f"is of the type {values.get('adapter.type')!r}")
    if _INVOCATION in adapter.kinds:
        reason = "is invoked by tokens (aLoRA): inferd does not run such adapters"
        raise _unsupported(name, reason)
    made_for, architecture = (f.values.get("general.architecture") for f in (adapter, model))
    if not isinstance(made_for, str) or made_for != architecture:
        reason = f"was made for the architecture {made_for!r}, the model is of {architecture!r}"
        raise _unfit(name, reason)
    alpha = values.get(_ALPHA, 0.0)
    is_finite = isinstance(alpha, float) and math.isfinite(alpha)
    if adapter.kinds.get(_ALPHA, _FLOAT32_ENTRY) != _FLOAT32_ENTRY or not is_finite:
        raise _unfit(name, f"is damaged: {_ALPHA} is not a number")


def _pairs(adapter: GgufFile, name: str) -> Iterator[tuple[str, GgufTensor, GgufTensor]]:
    """Yield the changed tensors, with the two matrices of each."""
    for key, a in adapter.tensors.items():
        target = key.removesuffix(_A).removesuffix(_B)
        b = adapter.tensors.get(target + _B)
        if target == key and key.endswith(_NORM):
            continue
        if target == key or _A in target or _B in target:
            raise _unfit(name, f"has a tensor {key!r}")
        if b is None or target + _A not in adapter.tensors:
            raise _unfit(name, f"has one matrix of two for {target!r}")
        if key.endswith(_A):
            yield target, a, b


def _check_pair(name: str, target: str, a: GgufTensor, b: GgufTensor, model: GgufFile) -> None:
    base = model.tensors[target]
    bad = next((m.kind for m in (a, b) if m.kind not in _EXPONENTS), None)
    if bad is not None or base.kind == lib.GGML_TYPE_NVFP4:
        kind = base.kind if bad is None else bad
        raise _unsupported(
            name,
            f"changes {target!r} with matrices of a type that cannot be used ({kind})",
            "convert it with --outtype f16; models of the type NVFP4 take no adapters",
        )
    if target == _EMBEDDING and _OUTPUT not in model.tensors:
        reason = "changes the embeddings, which are also the model's output layer"
        raise _unsupported(name, reason, "train it without embed_tokens")
    if not _fits(_padded(a.shape), _padded(b.shape), _padded(base.shape), target):
        raise _unfit(
            name,
            f"does not fit {target!r}: matrices of {list(a.shape)} and {list(b.shape)} for one of"
            f" {list(base.shape)}",
        )


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, 1, 1, 1, 1)[:4]


def _fits(a: tuple[int, ...], b: tuple[int, ...], base: tuple[int, ...], target: str) -> bool:
    if min(a) < 1 or a[2:] != base[2:] or b[2:] != base[2:]:
        return False
    if target == _EMBEDDING:  # the first matrix is transposed, to look up its rows
        return (a[1], b[1]) == (base[1], base[0]) and a[0] == b[0]
    return (a[0], b[1]) == base[:2] and a[1] == b[0]


def check_numbers(fd: int, adapter: GgufFile, name: str) -> None:
    """Check that all values of an adapter are finite; otherwise results would become NaN.

    :raises LoadFailed: a value is a NaN or an infinity.
    """
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        for key, tensor in adapter.tensors.items():
            if tensor.kind not in _EXPONENTS:
                continue  # a norm, which has no effect
            dtype, exponent = _EXPONENTS[tensor.kind]
            begin, count = adapter.data_begin + tensor.begin, tensor.size // dtype.itemsize
            numbers = np.frombuffer(data, dtype, count, begin)
            is_damaged = bool(((numbers & exponent) == exponent).any())
            del numbers  # otherwise the mapping cannot be closed
            if is_damaged:
                reason = f"the adapter {name!r} is damaged: not all of {key!r} are numbers"
                raise LoadFailed(reason, hint="get the file again")


def hash_of(fd: int) -> str:
    """Return a hash of the file's contents."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as data:
        return hashlib.sha256(data).hexdigest()[:32]


class LlamaAdapters:
    """The loaded and selected adapters. Owned by the model's thread; *file* is the model's own."""

    def __init__(self, model: Any, context: Any, file: GgufFile):
        self._model, self._context, self._file = model, context, file
        self._loaded: dict[str, tuple[Any, AdapterInfo]] = {}
        """By id, llama.cpp's pointer and the description."""
        self._chosen: tuple[str, ...] = ()
        self._applied: tuple[str, ...] = ()

    def add(self, spec: AdapterSpec) -> AdapterInfo:
        """Load an adapter; see `LanguageModel.add_adapter`."""
        name = os.path.basename(spec.path)
        with open_model_file(spec.path) as fd:
            file = read_gguf(fd, name)
            check_adapter(file, self._file, name)
            adapter_id = hash_of(fd)
            if adapter_id not in self._loaded:
                check_numbers(fd, file, name)
                size = sum(tensor.size for tensor in file.tensors.values())
                info = AdapterInfo(id=adapter_id, size_bytes=size)
                self._loaded[adapter_id] = self._load(fd, name), info
        return self._loaded[adapter_id][1]

    def _load(self, fd: int, name: str) -> Any:
        log = capture()
        log.clear()
        with c_file(fd, name) as stream:
            pointer = lib.llama_adapter_lora_init_from_file_ptr(self._model, stream)
        if not pointer:
            raise LoadFailed(
                f"llama.cpp cannot load the adapter {name!r}: {log.cause()}",
                hint="was it made for this model, and is there memory for it?",
            )
        return pointer

    def remove(self, adapter_id: str) -> None:
        """Unload an adapter; see `LanguageModel.remove_adapter`."""
        assert adapter_id not in {split_key(key)[0] for key in self._chosen}, "it is in use"
        self.apply()  # the context may still point to it
        lib.llama_adapter_lora_free(self._loaded.pop(adapter_id)[0])

    def choose(self, keys: tuple[str, ...]) -> None:
        """Select the adapters of the next steps; see `LanguageModel.set_adapters`."""
        missing = next((i for i, _ in map(split_key, keys) if i not in self._loaded), None)
        if missing is not None:
            raise InvalidArgument(
                f"the model has no adapter {missing!r}",
                hint="it was removed or its file has changed: `inferd show` lists the adapters",
            )
        self._chosen = keys

    def apply(self) -> None:
        """If the selection has changed, set it in the context, which then rebuilds its graphs."""
        if self._chosen == self._applied:
            return
        pairs = [split_key(key) for key in self._chosen]
        pointers = [self._loaded[adapter_id][0] for adapter_id, _ in pairs]
        lib.llama_set_adapters_lora(
            self._context,
            (lib.llama_adapter_lora_p_ctypes * len(pairs))(*pointers),
            len(pairs),
            (ctypes.c_float * len(pairs))(*(scale for _, scale in pairs)),
        )
        self._applied = self._chosen

    def close(self) -> None:
        """Forget all adapters, which llama.cpp frees with their model."""
        self._loaded.clear()
        self._chosen = self._applied = ()


# The weights that llama.cpp uses without adapters, by architecture. Its graphs multiply them by
# `ggml_mul_mat` instead of `build_lora_mm` (`src/models/`), so that an adapter of them would have
# no effect, and no error. `make archs` checks that each other weight of its models has one.
_BLOCK = re.compile(r"blk\.\d+\.")
_ALWAYS = "ssm_conv1d ssm_a ssm_d shortconv.conv ple_conv1d"
_LATENT = "attn_q attn_q_a attn_q_b attn_kv_a_mqa attn_kv_b attn_k_b attn_v_b"
_SPARSE = f"{_LATENT} output indexer.proj indexer.attn_k indexer.attn_q_b"
_HYPER = "output_hc_fn hc_attn_fn hc_ffn_fn"
_DELTA = (
    f"{_LATENT} output attn_k attn_v attn_qkv attn_output attn_gate"
    " ssm_f_a ssm_f_b ssm_g ssm_g_a ssm_g_b ssm_beta"
)
_EXPERTS = "ffn_gate_inp ffn_routed_up ffn_routed_down ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
_TIME_MIX = " ".join(f"time_mix_{name}{number}" for name in "wavg" for number in (1, 2))
_BY_ARCHITECTURE = {
    **dict.fromkeys(("deepseek2", "deepseek2-ocr", "mistral4"), f"{_LATENT} output"),
    **dict.fromkeys(("deepseek32", "glm-dsa", "dots3note"), _SPARSE),
    "deepseek4": f"{_HYPER} output attn_output_a attn_compressor_ape indexer_compressor_ape",
    **dict.fromkeys(("minicpm3", "plm"), _LATENT),
    "hy_v4": f"{_SPARSE} {_HYPER} attn_gate",
    **dict.fromkeys(("kimi-linear", "bailingmoe3"), _DELTA),
    "glm5-next": f"{_DELTA} {_SPARSE} {_HYPER} indexer_compressor_gate indexer_compressor_ape",
    "kimi-k3": f"{_DELTA} {_EXPERTS} ffn_gate ffn_up ffn_down",
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "ffn_latent_up ffn_latent_down"),
    "gemma3n": "altup_router altup_unembd_proj altup_proj",
    **dict.fromkeys(("rwkv6", "rwkv6qwen2"), "time_mix_w1 time_mix_decay_w1 time_mix_decay_w2"),
    **dict.fromkeys(("rwkv7", "arwkv7"), _TIME_MIX),
}
_WITHOUT = {name: frozenset(words.split()) for name, words in _BY_ARCHITECTURE.items()}
_NEVER = frozenset(_ALWAYS.split())


def is_adapted(weight: str, architecture: str) -> bool:
    """Return whether an adapter of a *weight* has an effect in a model of this *architecture*."""
    name = _BLOCK.sub("", weight.removesuffix(".weight"))
    return name not in _NEVER and name not in _WITHOUT.get(architecture, ())

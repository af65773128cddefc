"""Opening of llama.cpp's model and context from a `ModelSpec`.

Loading and memory estimates share these checks, parameters and errors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as lib

from ...encoder_prompts import ENCODER_DECODERS, ctx_size_trained
from ...engine_options import (
    CACHE_TYPES,
    EngineOptions,
    check_heads,
    head_sizes,
    is_quantized,
    read_engine_options,
    read_overrides,
)
from ...errors import InvalidArgument, LoadFailed, OutOfMemory, UnsupportedOperation
from ...gguf import parts_of
from ...gguf.header import DamagedHeader
from ...gguf.projector import read_projector
from ...library import LLAMA_COMMIT
from ...memory import check_devices
from ...model_spec import ModelSpec
from ...tuning_choice import (
    UNKNOWN_CPU,
    ChosenSetting,
    ModelShape,
    Setting,
    choose_setting,
    shape_of,
)
from ..llama_log import LogRing
from ..text.vocab import Vocab
from .devices import (
    c_function,
    devices,
    has_broken_amx,
    layers_of,
    place_experts,
    place_layers,
)
from .field_check import BadField, bad_value
from .gguf_check import GgufFile, open_model_file, read_gguf, read_parts, unusable
from .nextn import check_nextn

_VALUE_BYTES = 256
_POSITION_BIASES = ("enc.blk.0.attn_rel_b.weight", "dec.blk.0.attn_rel_b.weight")
_NUMBERS = (
    *("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length"),
)


def model_shape(options: EngineOptions, model: Any) -> ModelShape:
    """Return the shape of a llama.cpp *model*, whose weights need not be loaded."""
    architecture = _value(model, "general.architecture")
    values: dict[str, object] = {"general.architecture": architecture}
    for name in _NUMBERS:
        text = _value(model, f"{architecture}.{name}")
        values[f"{architecture}.{name}"] = int(text) if text.isdecimal() else 0
    types = {"cache-type-k": options.cache_type_k, "cache-type-v": options.cache_type_v}
    return shape_of(values, int(lib.llama_model_size(model)), types)


def _value(model: Any, key: str) -> str:
    buffer = ctypes.create_string_buffer(_VALUE_BYTES)
    if lib.llama_model_meta_val_str(model, key.encode(), buffer, _VALUE_BYTES) < 0:
        return ""
    return buffer.value.decode("utf-8", "replace")


def chosen_setting(spec: ModelSpec, options: EngineOptions, model: Any) -> ChosenSetting | None:
    """Return the setting of a load on the CPU; None if llama.cpp decides, because devices have
    layers or the type of the values allows only flash attention.
    """
    if layers_of(spec, model) or is_quantized(options.cache_type_v):
        return None
    if decoder_start_token(model) is not None:
        return None
    tuning = spec.tuning
    configured = None if options.flash_attn == "auto" else Setting(options.flash_attn == "on")
    cpu = UNKNOWN_CPU if tuning is None else tuning.cpu
    records = () if tuning is None else tuning.records
    return choose_setting(configured, model_shape(options, model), cpu, LLAMA_COMMIT, records)


CTX_SIZE_DEFAULT_MAX = 4096
CTX_SIZE_STEP = 256
"""llama.cpp rounds each sequence's context up to a multiple (`llama_context`'s constructor)."""
UBATCH_SIZE_MAX = 512
WEIGHTS_UBATCH_SIZE_MAX = 128
"""The same without flash attention on the CPU. The buffer of attention weights then takes a quarter
of the memory, and stays in the caches, so that a long prompt takes 0.9 of the time.
"""
LOGIT_BYTES = 4
LOGITS_MAX = 128
LOGITS_BYTES_MAX = 16 << 20
"""Bounds on the tokens with logits in a step, and on the memory of their logits, unless the slots
need more: 85 tokens with a vocabulary of 49k, 16 with one of 262k.
"""
CTX_CELLS_MAX = (1 << 31) - 1
_ALLOCATION = "alloc"
"""The part of llama.cpp's and ggml's messages that shows that memory ran out."""

GGML_TYPE_BF16 = 30
"""`enum ggml_type` in ggml.h; the bindings lack it."""
_CACHE_TYPES = {
    name: getattr(lib, f"GGML_TYPE_{name.upper()}", GGML_TYPE_BF16) for name in CACHE_TYPES
}
_WHOLE_IMAGES = ("gemma3", "gemma4v", "gemma4uv", "deepseek4v")
"""The projectors whose images have no causal attention (`mtmd_decode_use_non_causal`)."""
_NUMA = {
    "distribute": lib.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": lib.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": lib.GGML_NUMA_STRATEGY_NUMACTL,
}
FLASH_ATTENTION = {
    "auto": lib.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": lib.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_ROPE_NUMBERS = (
    *("rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor"),
    *("yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
)
"""Parameters of llama.cpp with the same names and defaults as the options."""
_ROPE_SCALING = {
    "none": lib.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": lib.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": lib.LLAMA_ROPE_SCALING_TYPE_YARN,
    "longrope": lib.LLAMA_ROPE_SCALING_TYPE_LONGROPE,
}

_DRAFT = "a draft model, which guesses the tokens of another one"
_NOT_RUN = {
    "cogvlm": "a CogVLM, for whose last token llama.cpp returns the logits of another one",
    "eagle3": _DRAFT,
    "dflash": _DRAFT,
    "gemma4-assistant": _DRAFT,
    "wavtokenizer-dec": "a vocoder, which makes sound of tokens",
}
"""By architecture, models that llama.cpp cannot run alone, or not rightly."""

_ONE_SLOT = ("plamo2",)
"""Architectures that compute wrongly in a step with several tokens of several slots."""
_EVEN_STEPS = ("kimi-linear",)
"""Architectures for whose full step llama.cpp aborts unless each slot has equally many tokens."""


def name_of(spec: ModelSpec) -> str:
    """Return the model's name in messages, which is its file's name if it has a file."""
    return os.path.basename(spec.path) or spec.name


def read_llama_options(spec: ModelSpec) -> EngineOptions:
    """Return the options of *spec*, after a check of the options and of the shape."""
    options = read_engine_options(spec.options)
    cells = _ctx_size(spec.ctx_size) * spec.slots
    if not 0 < spec.slots <= lib.llama_max_parallel_sequences() or cells > CTX_CELLS_MAX:
        raise InvalidArgument(
            f"{spec.slots} slots with a ctx-size of {spec.ctx_size} each are out of range",
            hint=f"use at most {lib.llama_max_parallel_sequences()} slots and"
            f" {CTX_CELLS_MAX} tokens in all",
        )
    if spec.ctx_size < 0 or not 0 < spec.batch_size <= CTX_CELLS_MAX:
        raise InvalidArgument(
            f"ctx-size {spec.ctx_size} or batch-size {spec.batch_size} is out of range",
            hint=f"ctx-size is 0 or more, batch-size 1 to {CTX_CELLS_MAX}",
        )
    return options


def _ctx_size(size: int) -> int:
    return -(-size // CTX_SIZE_STEP) * CTX_SIZE_STEP


def ctx_size_of(spec: ModelSpec, model: Any) -> int:
    """Return the size of a slot's context in tokens, rounded as by llama.cpp, but at most the
    positions that the model has learned.
    """
    architecture = _value(model, "general.architecture")
    trained = ctx_size_trained(architecture, int(lib.llama_model_n_ctx_train(model)))
    size = _ctx_size(spec.ctx_size or min(trained, CTX_SIZE_DEFAULT_MAX))
    return min(size, positions_max(model) or size)


_find_tensor = c_function(
    "_ZNK11llama_model10get_tensorEPKc", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p
)


def positions_max(model: Any) -> int:
    """Return the number of positions of a model that has learned an embedding for each, such as
    GPT-2; 0 if it computes them. llama.cpp aborts the process for a token past the last one.
    """
    has_learned = bool(_find_tensor(model, b"position_embd.weight"))
    return int(lib.llama_model_n_ctx_train(model)) if has_learned else 0


def open_model(
    spec: ModelSpec,
    options: EngineOptions,
    params: Any,
    begin: Callable[[str], None] | None = None,
) -> tuple[Any, GgufFile]:
    """Check the file of *spec* and load it with llama.cpp's *params*; the caller frees the model.

    *begin* is called after the check and before the load, with the file's path, which is empty for
    a descriptor. The model is null if llama.cpp failed, or if the callback in *params* stopped it.

    :raises LoadFailed: the file is missing, unreadable, damaged or of an unknown kind.
    :raises InvalidArgument: *options* or *spec* do not fit the model or the devices.
    :raises UnsupportedOperation: this kind of model cannot be run.
    """
    name = name_of(spec)
    path = str(parts_of(Path(spec.path))[0])
    with nullcontext(spec.fd) if spec.fd >= 0 else open_model_file(path) as fd:
        file = read_gguf(fd, name)
        _check_content(file, name, spec.slots)
        _check_values(file, options, name)
        check_heads(options, head_sizes(file.values))
        _override_values(options, params)
        lib.llama_backend_init()
        if options.numa != "off":
            lib.llama_numa_init(_NUMA[options.numa])
        if has_broken_amx():
            params.use_extra_bufts = False  # weights stay as they are in the file, without AMX
        check_devices(spec, devices())
        place_layers(spec, params)
        if spec.fd < 0:
            read_parts(path, file)
        check_nextn(spec, file, name)
        params.load_mtp = spec.nextn
        place_experts(options, name, file.tensors, params)
        if begin is not None:
            begin("" if spec.fd >= 0 else path)
        if spec.fd >= 0:
            model = _load_descriptor(fd, name, file, params)
        else:
            model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if model:
        try:
            _check_kind(model, file, name)
            _check_encoder_decoder(model, file, options, name)
        except (InvalidArgument, LoadFailed, UnsupportedOperation):
            lib.llama_model_free(model)
            raise
    return model, file


@contextmanager
def open_vocab(path: str) -> Iterator[Vocab]:
    """Open the vocabulary of a model's file, which has been checked, and free it at the end."""
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise LoadFailed(f"llama.cpp cannot read the vocabulary of {os.path.basename(path)!r}")
    try:
        vocab = lib.llama_model_get_vocab(model)
        if lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE:  # llama.cpp would abort
            raise LoadFailed(f"{os.path.basename(path)!r} has no vocabulary")
        yield Vocab(vocab)
    finally:
        lib.llama_model_free(model)


def _check_content(file: GgufFile, name: str, slots: int) -> None:
    """Refuse files that are not complete models, with a clearer error than llama.cpp's."""
    kind, architecture = (file.values.get(f"general.{k}") for k in ("type", "architecture"))
    if kind == "mmproj" or architecture == "clip":
        raise UnsupportedOperation(
            f"{name!r} is a projector for images or sound, not a language model",
            hint="load the language model that it belongs to, with this file beside it (`mmproj`)",
        )
    if str(architecture) in _NOT_RUN:
        raise UnsupportedOperation(
            f"{name!r} is {_NOT_RUN[str(architecture)]}: inferd does not run such models",
            hint="load another language model",
        )
    if architecture in _ONE_SLOT and slots > 1:
        raise UnsupportedOperation(
            f"{name!r} runs in one slot only: llama.cpp mixes up the texts that this kind of model"
            " computes together",
            hint="set slots = 1 for this model",
        )
    if kind == "adapter":
        raise UnsupportedOperation(
            f"{name!r} is an adapter (LoRA), not a model", hint="load the model it was made for"
        )


def _check_values(file: GgufFile, options: EngineOptions, name: str) -> None:
    """Refuse values that llama.cpp does not survive, in the file or by `override-kv`."""
    overrides = dict(read_overrides(options.override_kv))
    shapes = {key: tensor.shape for key, tensor in file.tensors.items()}
    bad = bad_value(file.values | overrides, file.lists, shapes)
    if bad is not None:
        raise unusable(name, bad, "correct the option override-kv" if bad.key in overrides else "")


def load_failed(name: str, log: LogRing) -> LoadFailed | OutOfMemory:
    """Return the error for a model that llama.cpp could not load."""
    message = f"llama.cpp cannot load {name!r}: {log.cause()}"
    if _ALLOCATION in message:
        return OutOfMemory(message, hint="use a smaller quantization of it, or unload other models")
    return LoadFailed(
        message,
        hint="check that it is a complete language model of a kind that this llama.cpp supports",
    )


@contextmanager
def c_file(fd: int, name: str) -> Iterator[Any]:
    """Yield a ``FILE *`` at the beginning of *fd*, with which llama.cpp reads the checked file."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fdopen.argtypes, libc.fdopen.restype = [ctypes.c_int, ctypes.c_char_p], ctypes.c_void_p
    libc.fclose.argtypes = [ctypes.c_void_p]
    # A duplicate shares its position with the original descriptor.
    os.lseek(fd, 0, os.SEEK_SET)
    own = os.dup(fd)
    stream = libc.fdopen(own, b"rb")
    if not stream:
        os.close(own)
        raise LoadFailed(f"{name!r} cannot be read: {os.strerror(ctypes.get_errno())}")
    try:
        yield stream
    finally:
        libc.fclose(stream)


def _load_descriptor(fd: int, name: str, file: GgufFile, params: Any) -> Any:
    if file.is_split:
        raise UnsupportedOperation(
            f"{name!r} is one part of a split model and was passed without the others",
            hint="merge the parts with llama-gguf-split --merge, or load the model by name",
        )
    with c_file(fd, name) as stream:
        return lib.llama_model_load_from_file_ptr(stream, params)


def _check_kind(model: Any, file: GgufFile, name: str) -> None:
    vocab = lib.llama_model_get_vocab(model)
    _check_added_tokens(vocab, name)
    runs_encoder = file.values.get("general.architecture") in ENCODER_DECODERS
    for applies, kind in (
        (lib.llama_model_has_encoder(model) and not runs_encoder, "an encoder"),
        (not lib.llama_model_has_decoder(model), "no decoder"),
        (lib.llama_model_is_diffusion(model), "a diffusion process"),
        (lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE, "no vocabulary"),
    ):
        if applies:
            raise UnsupportedOperation(
                f"{name!r} has {kind}: inferd does not run such models",
                hint="use a decoder-only language model",
            )


def decoder_start_token(model: Any) -> int | None:
    """Return the token with which the decoder of an encoder-decoder begins, as llama.cpp's programs
    choose it: −1 if its file has none. Return None for other models.
    """
    if not (lib.llama_model_has_encoder(model) and lib.llama_model_has_decoder(model)):
        return None
    token = int(lib.llama_model_decoder_start_token(model))
    if token == lib.LLAMA_TOKEN_NULL:
        token = int(lib.llama_vocab_bos(lib.llama_model_get_vocab(model)))
    return token


def _check_encoder_decoder(model: Any, file: GgufFile, options: EngineOptions, name: str) -> None:
    """Check the start token and the options of an encoder-decoder.

    :raises LoadFailed: it has no start token, or lacks a tensor that llama.cpp reads unchecked.
    :raises InvalidArgument: *options* need flash attention.
    """
    token = decoder_start_token(model)
    if token is None:
        return
    vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    if not 0 <= token < vocab_size:
        key = f"{_value(model, 'general.architecture')}.decoder_start_token_id"
        bad = BadField(key, token, f"the decoder begins with a token below {vocab_size}")
        raise unusable(name, bad, f"set the option override-kv to {key} and a token")
    for tensor in _POSITION_BIASES:
        if tensor not in file.tensors:
            rule = "the attention adds it, by the distance of two tokens"
            raise unusable(name, BadField(tensor, "missing", rule))
    if options.flash_attn == "on" or is_quantized(options.cache_type_v):
        raise InvalidArgument(
            f"{name!r} is an encoder-decoder whose attention depends on positions: llama.cpp has no"
            " flash attention for it, and no quantized values (cache-type-v)",
            hint="leave out flash-attn and cache-type-v for this model",
        )


def _check_added_tokens(vocab: Any, name: str) -> None:
    """Refuse a vocabulary that adds a token to texts which it does not have: llama.cpp would abort
    at the first text.
    """
    adds = {
        "bos": lib.llama_vocab_get_add_bos(vocab),
        "eos": lib.llama_vocab_get_add_eos(vocab),
        "seperator": False,  # as llama.cpp spells it
    }
    match lib.llama_vocab_type(vocab):
        case lib.LLAMA_VOCAB_TYPE_WPM:
            adds = {"bos": True, "eos": False, "seperator": True}
        case lib.LLAMA_VOCAB_TYPE_RWKV | lib.LLAMA_VOCAB_TYPE_PLAMO2 | lib.LLAMA_VOCAB_TYPE_NONE:
            return
    for key, function in (("bos", "bos"), ("eos", "eos"), ("seperator", "sep")):
        token = getattr(lib, f"llama_vocab_{function}")(vocab)
        if adds[key] and token == lib.LLAMA_TOKEN_NULL:
            rule = "texts get this token, and the vocabulary does not have it"
            raise unusable(name, BadField(f"tokenizer.ggml.{key}_token_id", token, rule))


def open_context(spec: ModelSpec, params: Any, model: Any, log: LogRing) -> Any:
    """Return a new context with llama.cpp's *params*; the caller frees it."""
    if _value(model, "general.architecture") in _EVEN_STEPS:
        rest = params.n_ubatch % params.n_seq_max
        params.n_ubatch = max(params.n_ubatch - rest, params.n_seq_max)
        params.n_batch = max(params.n_batch, params.n_ubatch)
    pointer = lib.llama_init_from_model(model, params)
    if not pointer:
        cause = log.cause()
        kind = OutOfMemory if _ALLOCATION in cause else LoadFailed
        raise kind(
            f"no context for {name_of(spec)!r} with {spec.slots} slots: {cause}",
            hint="use a smaller ctx-size or fewer slots",
        )
    return pointer


def set_load_mode(options: EngineOptions, params: Any) -> None:
    """Write how the file is read into llama.cpp's *params*."""
    if options.mlock:
        mapped, read = lib.LLAMA_LOAD_MODE_MMAP_MLOCK, lib.LLAMA_LOAD_MODE_MLOCK
        params.load_mode = mapped if options.mmap else read
    elif not options.mmap:
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE


def _override_values(options: EngineOptions, params: Any) -> None:
    """Write the values that replace those of the file into llama.cpp's *params*, which keep them
    alive. An entry without a key ends the list.
    """
    overrides = read_overrides(options.override_kv)
    if not overrides:
        return
    entries = (lib.llama_model_kv_override * (len(overrides) + 1))()
    for entry, (key, value) in zip(entries, overrides, strict=False):
        entry.key = key.encode()
        match value:
            case bool():
                entry.tag, entry.value.val_bool = lib.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
            case int():
                entry.tag, entry.value.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, value
            case float():
                entry.tag, entry.value.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
            case str():
                entry.tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
                entry.value.val_str = value.encode()
    params.kv_overrides = entries


def _set_attention(
    spec: ModelSpec, options: EngineOptions, chosen: ChosenSetting | None, params: Any
) -> None:
    """Write the kind of attention and the size of micro-batches into llama.cpp's *params*."""
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attn]
    params.n_ubatch = min(spec.batch_size, UBATCH_SIZE_MAX)
    if chosen is None:
        return
    params.flash_attn_type = FLASH_ATTENTION["on" if chosen.setting.flash_attn else "off"]
    if chosen.setting.ubatch:
        params.n_ubatch = min(spec.batch_size, chosen.setting.ubatch)
    elif not chosen.setting.flash_attn:
        params.n_ubatch = min(spec.batch_size, WEIGHTS_UBATCH_SIZE_MAX)


def _computes_images_whole(mmproj: str) -> bool:
    """Return whether the entries of an image may see each other. Then one micro-batch has all of
    them, or llama.cpp ends the process.
    """
    try:
        return read_projector(Path(mmproj)).kind in _WHOLE_IMAGES
    except (OSError, DamagedHeader):  # the encoder reports it
        return True


def logits_max_of(slots: int, batch_size: int, model: Any, logits_per_slot: int = 1) -> int:
    """Return the most tokens of a step that have logits. llama.cpp aborts the process for more.

    Each slot needs *logits_per_slot*. Further ones are for the logprobs of prompts; a step has
    fewer of them if the vocabulary is large, because the logits of all are in memory at the same
    time.
    """
    tokens = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
    of_prompts = min(LOGITS_MAX, LOGITS_BYTES_MAX // (LOGIT_BYTES * tokens))
    return max(slots, min(batch_size, max(slots * logits_per_slot, of_prompts)))


ROLLBACK_MAX = 8
"""The most tokens for which a recurrent state can be rolled back, which bounds drafts."""
ROLLBACK_BYTES_MAX = 256 << 20
"""The most bytes of the earlier states of all slots that this takes."""


def rollback_of(slots: int, ubatch_size: int, model: Any) -> int:
    """Return for how many tokens the recurrent states of *model* can be rolled back after a step:
    0 if the states of 2 tokens would take too much memory, or if their size is not known. llama.cpp
    ignores it for architectures that it cannot roll back. It aborts if a micro-batch does not have
    more tokens.
    """
    if not (lib.llama_model_is_hybrid(model) or lib.llama_model_is_recurrent(model)):
        return 0
    token_bytes = slots * _recurrent_bytes(model)
    most = min(ROLLBACK_MAX, ubatch_size // 4)
    most = min(most, ROLLBACK_BYTES_MAX // token_bytes) if token_bytes else 0
    return most if most > 1 else 0


KEPT_BYTES_MAX = 256 << 20
"""The most bytes of the states of all slots that are kept to go back to."""


def kept_bytes_of(slots: int, model: Any) -> int:
    """Return the most bytes of the states of *slots* that are kept where llama.cpp cannot roll
    recurrent states back: 0 if *model* has none, or if they would take too much memory or their
    size is not known.
    """
    if not (lib.llama_model_is_hybrid(model) or lib.llama_model_is_recurrent(model)):
        return 0
    size = slots * _recurrent_bytes(model)
    return size if size <= KEPT_BYTES_MAX else 0


def _recurrent_bytes(model: Any) -> int:
    """Return the bytes of the recurrent states of a sequence, at least (`llama_hparams::n_embd_r`,
    `n_embd_s`): as if all layers were recurrent. 0 if the size is not known.
    """
    architecture = _value(model, "general.architecture")

    def number(name: str) -> int:
        text = _value(model, f"{architecture}.{name}")
        return int(text) if text.isdecimal() else 0

    width, heads = number("embedding_length"), number("attention.head_count")
    if cache := number("shortconv.l_cache"):
        values = width * (cache - 1)
    elif head := number("wkv.head_size"):
        values = width * (head + max(number("token_shift_count"), 2))
    elif head := number("kda.head_dim"):
        values = heads * head * (head + 3 * max(number("ssm.conv_kernel"), 4))
    else:
        inner, state = number("ssm.inner_size"), number("ssm.state_size")
        conv = inner + 2 * number("ssm.group_count") * state
        values = inner * state + number("ssm.conv_kernel") * conv
    return 4 * number("block_count") * values


def _keeps_threads(spec: ModelSpec) -> bool:
    return spec.tuning is not None and spec.tuning.keeps_threads


def _set_for_encoder(params: Any, spec: ModelSpec, model: Any) -> None:
    """Write the parameters of one slot of an encoder-decoder, which has a context of its own. A
    prompt is encoded in one micro-batch, and flash attention lacks the bias of the positions.
    """
    params.n_ctx, params.n_seq_max = ctx_size_of(spec, model), 1
    params.n_ubatch = params.n_batch
    params.flash_attn_type = FLASH_ATTENTION["off"]


def context_params(spec: ModelSpec, options: EngineOptions, model: Any) -> Any:
    """Return llama.cpp's parameters of the first context, or of each slot of an encoder-decoder."""
    params = lib.llama_context_default_params()
    params.n_ctx = ctx_size_of(spec, model) * spec.slots
    params.n_seq_max, params.n_batch = spec.slots, spec.batch_size
    params.n_outputs_max = logits_max_of(spec.slots, spec.batch_size, model, spec.logits_per_slot)
    chosen = chosen_setting(spec, options, model)
    _set_attention(spec, options, chosen, params)
    if spec.mmproj and _computes_images_whole(spec.mmproj):
        params.n_ubatch = params.n_batch
    measured = Setting(False) if chosen is None or _keeps_threads(spec) else chosen.setting
    params.n_threads = measured.threads or spec.threads or len(os.sched_getaffinity(0))
    params.n_threads_batch = options.threads_batch or measured.threads_batch or params.n_threads
    params.type_k = _CACHE_TYPES[options.cache_type_k]
    params.type_v = _CACHE_TYPES[options.cache_type_v]
    params.swa_full = options.swa_full
    if options.rope_scaling:
        params.rope_scaling_type = _ROPE_SCALING[options.rope_scaling]
    for name in _ROPE_NUMBERS:
        setattr(params, name, getattr(options, name))
    params.kv_unified = False
    params.offload_kqv = params.op_offload = spec.n_gpu_layers != 0
    params.no_perf = True
    params.n_rs_seq = rollback_of(spec.slots, params.n_ubatch, model)
    if decoder_start_token(model) is not None:
        _set_for_encoder(params, spec, model)
    return params

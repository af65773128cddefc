"""Options of llama.cpp that the operator sets for each model, and their checks.

They are model parameters of the table (`backends/params/`), and reach the worker in
`ModelSpec.options`. This module loads no engine: the configuration checks them before a load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from .errors import InvalidArgument

CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f16": (1, 2),
    "f32": (1, 4),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}
"""By type of KV states, how many numbers and how many bytes a block has. The types are those of
`kv_cache_types` in llama.cpp's common/arg.cpp, the sizes those of ggml-common.h.
"""
NUMA_STRATEGIES = ("off", "distribute", "isolate", "numactl")
ROPE_SCALINGS = ("", "none", "linear", "yarn", "longrope")
OVERRIDES_MAX = 64
OVERRIDE_BYTES_MAX = 127
"""Bytes of a key or a text: `llama_model_kv_override` ends both with a NUL."""

CacheType = Literal["f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
Override = tuple[str, bool | int | float | str]


class EngineOptions(
    msgspec.Struct, kw_only=True, frozen=True, rename="kebab", forbid_unknown_fields=True
):
    """The keys of `ModelSpec.options` for llama.cpp, with its defaults.

    Zero, the empty text and, for YaRN's numbers, -1 stand for the values of the model's file. If
    `threads_batch` is zero, steps with several tokens use as many threads as those with one.
    """

    flash_attn: Literal["auto", "on", "off"] = "auto"
    cache_type_k: CacheType = "f16"
    cache_type_v: CacheType = "f16"
    swa_full: bool = False
    rope_scaling: Literal["", "none", "linear", "yarn", "longrope"] = ""
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_fast: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_orig_ctx: int = 0
    override_kv: tuple[str, ...] = ()
    mmap: bool = True
    mlock: bool = False
    numa: Literal["off", "distribute", "isolate", "numactl"] = "off"
    threads_batch: int = 0
    cpu_moe: bool = False
    n_cpu_moe: int = 0

    @property
    def of_state(self) -> dict[str, Any]:
        """The options that a KV state depends on; the others do not change it. The kind of
        attention, on which it depends, too, is not among them: `auto` stands for either.
        """
        fields = msgspec.structs.asdict(self)
        return {name: fields[name] for name in fields if name not in _NOT_OF_STATE}

    @property
    def is_plain(self) -> bool:
        """Whether a context takes the same memory as without these options."""
        return all(getattr(self, name) == getattr(_PLAIN, name) for name in _OF_MEMORY)

    def without_memory(self) -> EngineOptions:
        """Return these options without those that change the memory of a context."""
        plain = {name: getattr(_PLAIN, name) for name in _OF_MEMORY}
        return msgspec.structs.replace(self, **plain)


_NOT_OF_STATE = frozenset(
    ("flash_attn", "mmap", "mlock", "numa", "threads_batch", "cpu_moe", "n_cpu_moe")
)
_OF_MEMORY = ("flash_attn", "cache_type_k", "cache_type_v", "swa_full")
_PLAIN = EngineOptions()
_ENCODED = {f.name: f.encode_name for f in msgspec.structs.fields(EngineOptions)}
ENGINE_OPTIONS: dict[str, Any] = {
    encoded: getattr(_PLAIN, name) for name, encoded in _ENCODED.items()
} | {"override-kv": []}
"""By the parameter's name, its default."""


def engine_options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a model's parameters that are options of the engine."""
    return {name: options[name] for name in ENGINE_OPTIONS if name in options}


def read_engine_options(values: Mapping[str, Any]) -> EngineOptions:
    """Return checked options.

    :raises InvalidArgument: an option is unknown or its value is wrong, or llama.cpp would refuse
        this combination of options, or abort because of it.
    """
    try:
        options = msgspec.convert(dict(values), EngineOptions)
    except msgspec.ValidationError as exc:
        raise InvalidArgument(f"the model's options: {exc}") from None
    if is_quantized(options.cache_type_v) and options.flash_attn == "off":
        raise InvalidArgument(
            f"cache-type-v {options.cache_type_v} needs flash attention, and flash-attn is off",
            hint="set flash-attn to auto or on, or cache-type-v to f16",
        )
    if options.cpu_moe and options.n_cpu_moe:
        raise InvalidArgument(
            f"cpu-moe keeps the experts of all layers on the CPU, and n-cpu-moe those of the first"
            f" {options.n_cpu_moe}",
            hint="leave out one of them, or set cpu-moe to false or n-cpu-moe to 0",
        )
    read_overrides(options.override_kv)
    return options


def is_quantized(cache_type: str) -> bool:
    """Return whether a type of KV states stores several numbers in a block."""
    return CACHE_TYPES[cache_type][0] > 1


def check_heads(options: EngineOptions, heads: Mapping[str, int]) -> None:
    """Check that the blocks of quantized KV states divide the sizes of a model's *heads*.

    Otherwise llama.cpp aborts without flash attention, and with it fails without a reason.

    :raises InvalidArgument: a head's size is not a multiple of its block.
    """
    for part, cache_type in (("k", options.cache_type_k), ("v", options.cache_type_v)):
        size, block = heads.get(part, 0), CACHE_TYPES[cache_type][0]
        if size % block:
            raise InvalidArgument(
                f"cache-type-{part} {cache_type} stores {block} numbers in a block, and this"
                f" model's heads have {size}",
                hint=f"set cache-type-{part} to f16",
            )


def head_sizes(values: Mapping[str, object]) -> dict[str, int]:
    """Return the sizes of a model's heads by `k` and `v`; 0 if its file's *values* lack a size."""
    architecture = values.get("general.architecture")

    def number(name: str) -> int:
        value = values.get(f"{architecture}.{name}")
        return value if isinstance(value, int) and value > 0 else 0

    heads = number("attention.head_count")
    usual = number("embedding_length") // heads if heads else 0
    return {
        "k": number("attention.key_length") or usual,
        "v": number("attention.value_length") or usual,
    }


def read_overrides(texts: tuple[str, ...]) -> list[Override]:
    """Return the keys and values of `override-kv`.

    :raises InvalidArgument: a text is not of the form KEY=TYPE:VALUE.
    """
    if len(texts) > OVERRIDES_MAX:
        raise InvalidArgument(f"override-kv has {len(texts)} keys, {OVERRIDES_MAX} at most")
    return [_read_override(text) for text in texts]


def _read_override(text: str) -> Override:
    key, _, typed = text.partition("=")
    kind, found, value = typed.partition(":")
    try:
        if not key or not found or "\0" in text or len(key.encode()) > OVERRIDE_BYTES_MAX:
            raise ValueError
        match kind:
            case "bool":
                return key, {"true": True, "false": False}[value]
            case "int":
                number = int(value)
                if not -(1 << 63) <= number < 1 << 63:
                    raise ValueError
                return key, number
            case "float":
                return key, float(value)
            case "str" if len(value.encode()) <= OVERRIDE_BYTES_MAX:
                return key, value
            case _:
                raise ValueError
    except (ValueError, KeyError):
        raise InvalidArgument(
            f"override-kv {text[:200]!r} is not of the form KEY=TYPE:VALUE",
            hint="TYPE is int, float, bool (true or false) or str; key and text have at most"
            f" {OVERRIDE_BYTES_MAX} bytes",
        ) from None


def cache_share(options: Mapping[str, Any]) -> float:
    """Return the size of KV states with these parameters, as a share of their size in f16. Keys and
    values count equally, because in most models they have the same size.
    """
    return sum(_shares(options)) / 2


def cache_share_max(options: Mapping[str, Any]) -> float:
    """Return an upper bound of that share for models whose keys and values differ in size."""
    return max(_shares(options))


def _shares(options: Mapping[str, Any]) -> list[float]:
    types = (options.get(f"cache-type-{part}", "f16") for part in ("k", "v"))
    return [size / numbers / 2 for numbers, size in map(CACHE_TYPES.__getitem__, types)]

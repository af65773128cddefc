"""The setting with which llama.cpp computes a model, and the model's shape, on which it depends."""

from __future__ import annotations

import ctypes
from typing import Any

from llama_cpp import llama_cpp as lib

from ...engine_options import EngineOptions, is_quantized
from ...library.engine_build import LLAMA_COMMIT
from ...model_spec import ModelSpec
from ...probes import Setting
from ...tuning_choice import UNKNOWN_CPU, ChosenSetting, ModelShape, choose_setting, shape_of
from .devices import layers_of

_VALUE_BYTES = 256
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
    tuning = spec.tuning
    configured = None if options.flash_attn == "auto" else Setting(options.flash_attn == "on")
    cpu = UNKNOWN_CPU if tuning is None else tuning.cpu
    records = () if tuning is None else tuning.records
    return choose_setting(configured, model_shape(options, model), cpu, LLAMA_COMMIT, records)

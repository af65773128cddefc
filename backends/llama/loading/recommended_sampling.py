"""Reading of the sampling parameters that a GGUF file recommends (`general.sampling.*`)."""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec
from llama_cpp import llama_cpp as lib

from ...errors import InvalidArgument
from ...params import read_options

VALUE_BYTES = 1024
_KEYS: dict[int, str] = {
    lib.LLAMA_MODEL_META_KEY_SAMPLING_SEQUENCE: "samplers",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_TOP_K: "top-k",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_TOP_P: "top-p",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIN_P: "min-p",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_XTC_PROBABILITY: "xtc-probability",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_XTC_THRESHOLD: "xtc-threshold",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_TEMP: "temp",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_LAST_N: "last-n-penalty",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_PENALTY_REPEAT: "repeat-penalty",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIROSTAT: "mirostat",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIROSTAT_TAU: "mirostat-tau",
    lib.LLAMA_MODEL_META_KEY_SAMPLING_MIROSTAT_ETA: "mirostat-eta",
}
"""As `common_init_from_params` reads them (`common/common.cpp`)."""


def recommended_sampling(model: Any) -> dict[str, Any]:
    """Return the file's values by parameter name, except invalid ones."""
    found: dict[str, Any] = {}
    buffer = ctypes.create_string_buffer(VALUE_BYTES)
    for key, name in _KEYS.items():
        text = lib.llama_model_meta_key_str(key)
        if lib.llama_model_meta_val_str(model, text, buffer, VALUE_BYTES) < 0:
            continue
        try:
            value = buffer.value.decode()
            number = value if name == "samplers" else msgspec.json.decode(value)
            found |= read_options({name: number}, strict=True).values
        except (InvalidArgument, UnicodeDecodeError, msgspec.DecodeError):
            continue  # don't refuse the file for a bad recommendation
    return found

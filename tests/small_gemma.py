"""Gemma 3 with a small vocabulary, for tests of two real models with different vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models import gemma3, written_once

__all__ = ("small_gemma3",)

_KEPT = np.r_[:40_960, 236_743:238_791]
"""The control tokens, the bytes and the most frequent words; the most frequent characters."""
_EMBEDDING = "token_embd.weight"


def small_gemma3() -> Path:
    """Return Gemma 3 270M with 43 k of its 262 k tokens, written once. A rare word takes more
    tokens, and the answers still make sense. A load takes a fifth of the CPU time, and so does the
    choice of a token.
    """
    return written_once(f"gemma-3-270m-{len(_KEPT)}-tokens.gguf", _write)


def _write(target: Path) -> None:
    model = gguf.GGUFReader(gemma3())
    file = gguf.GGUFWriter(target, "gemma3")
    for name, field in model.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            _add_field(file, name, field)
    for tensor in model.tensors:
        rows = tensor.data[_KEPT] if tensor.name == _EMBEDDING else tensor.data
        file.add_tensor(tensor.name, rows, raw_dtype=tensor.tensor_type)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _add_field(file: Any, name: str, field: Any) -> None:
    kind, *inner = field.types
    values = field.contents()
    if name.startswith("tokenizer.") and kind == gguf.GGUFValueType.ARRAY:
        values = [values[token] for token in _KEPT]
    file.add_key_value(name, values, kind, sub_type=inner[0] if inner else None)

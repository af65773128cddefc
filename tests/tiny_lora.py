"""A writer of adapters (LoRA) with random weights, for the tiny llama and models like it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

__all__ = ("SHAPES", "Matrices", "lora", "matrices", "write_lora")

SHAPES = {
    f"blk.{layer}.{name}.weight": shape
    for layer in range(3)
    for name, shape in (("attn_q", (64, 64)), ("attn_v", (32, 64)), ("ffn_down", (64, 128)))
}
"""Weights of the tiny llama, (rows, columns)."""
RANK = 4
Matrices = dict[str, NDArray[Any]]


def matrices(
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    seed: int = 1,
    rank: int = RANK,
    strength: float = 0.3,
) -> Matrices:
    """Return two random matrices per weight; their product changes it by about *strength*."""
    draw = np.random.default_rng(seed)
    found: Matrices = {}
    for name, (rows, columns) in shapes.items():
        a = draw.standard_normal((rank, columns)) * columns**-0.5
        b = draw.standard_normal((rows, rank)) * strength * rank**-0.5
        found[f"{name}.lora_a"], found[f"{name}.lora_b"] = a, b
    return {name: matrix.astype(np.float32) for name, matrix in found.items()}


def lora(path: Path, seed: int = 1, **options: Any) -> Path:
    """Write an adapter for the tiny llama."""
    return write_lora(path, matrices(seed=seed), **options)


def write_lora(
    path: Path,
    tensors: Matrices,
    *,
    architecture: str = "llama",
    general: str = "adapter",
    kind: str = "lora",
    alpha: Callable[[Any], None] = lambda file: file.add_float32("adapter.lora.alpha", 8.0),
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    more: Iterable[Callable[[Any], None]] = (),
) -> Path:
    """Write *tensors* and the entries of an adapter; *alpha* and *more* add further entries."""
    file = gguf.GGUFWriter(path, architecture)
    file.add_type(general)
    file.add_string("adapter.type", kind)
    for entry in (alpha, *more):
        entry(file)
    for name, matrix in tensors.items():
        file.add_tensor(name, matrix, raw_dtype=(types or {}).get(name))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path

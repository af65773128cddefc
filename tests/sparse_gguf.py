"""A writer of models with a header and a tensor list, but no weights: these are holes in the file.

The model with the shape of 14 billion parameters has its full size of 8 GB and takes a few
kilobytes of the disk. A small one can be loaded and computes zeros.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import msgspec
import numpy as np

from tests.tiny_gguf import VOCAB_SIZE, byte_vocabulary

__all__ = ("DEEP", "TOKEN_BYTES", "WEIGHT_BYTES_MIN", "Sizes", "write_sparse")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model with plain attention."""

    layers: int
    embedding: int
    feed_forward: int
    heads: int
    heads_kv: int
    head: int


LARGE = Sizes(layers=48, embedding=5120, feed_forward=13824, heads=40, heads_kv=8, head=128)
"""14 billion parameters."""
DEEP = Sizes(layers=4, embedding=256, feed_forward=512, heads=4, heads_kv=4, head=128)
"""A model of 2 MB whose KV states take 8 KiB a token in f16."""
TOKEN_BYTES = LARGE.layers * 2 * LARGE.heads_kv * LARGE.head * 2
"""Size of the KV state of one token, in f16: 192 KiB."""
WEIGHT_BYTES_MIN = 8 * 10**9
ALIGNMENT = 32
KIND = gguf.GGMLQuantizationType.Q4_1


def write_sparse(path: Path, sizes: Sizes = LARGE) -> Path:
    """Write a model of these *sizes* to *path* and return it."""
    writer = gguf.GGUFWriter(path, "llama")
    byte_vocabulary(writer)
    writer.add_context_length(32768)
    writer.add_embedding_length(sizes.embedding)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.feed_forward)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.heads_kv)
    writer.add_key_length(sizes.head)
    writer.add_value_length(sizes.head)
    writer.add_rope_dimension_count(sizes.head)
    writer.add_layer_norm_rms_eps(1e-5)
    size = sum(_add(writer, name, shape) for name, shape in _tensors(sizes))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + size + 4096)
    return path


def _tensors(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (VOCAB_SIZE, sizes.embedding)),
        ("output_norm.weight", (sizes.embedding,)),
        ("output.weight", (VOCAB_SIZE, sizes.embedding)),
    ]
    for layer in range(sizes.layers):
        block = f"blk.{layer}"
        tensors += [
            (f"{block}.attn_norm.weight", (sizes.embedding,)),
            (f"{block}.attn_q.weight", (sizes.heads * sizes.head, sizes.embedding)),
            (f"{block}.attn_k.weight", (sizes.heads_kv * sizes.head, sizes.embedding)),
            (f"{block}.attn_v.weight", (sizes.heads_kv * sizes.head, sizes.embedding)),
            (f"{block}.attn_output.weight", (sizes.embedding, sizes.heads * sizes.head)),
            (f"{block}.ffn_norm.weight", (sizes.embedding,)),
            (f"{block}.ffn_gate.weight", (sizes.feed_forward, sizes.embedding)),
            (f"{block}.ffn_up.weight", (sizes.feed_forward, sizes.embedding)),
            (f"{block}.ffn_down.weight", (sizes.embedding, sizes.feed_forward)),
        ]
    return tensors


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]) -> int:
    """Add a tensor without data; return its size in the file."""
    kind = KIND if len(shape) > 1 else gguf.GGMLQuantizationType.F32
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    return int(-(-size // ALIGNMENT) * ALIGNMENT)

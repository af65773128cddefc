"""A writer of a model with the shape of 14 billion parameters: header and tensor list, no weights.

The file has its full size of 8 GB and takes a few kilobytes of the disk.
"""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np

from tests.tiny_gguf import VOCAB_SIZE, byte_vocabulary

__all__ = ("LAYERS", "TOKEN_BYTES", "WEIGHT_BYTES_MIN", "write_sparse")

LAYERS, EMBEDDING, FEED_FORWARD = 48, 5120, 13824
HEADS, HEADS_KV, HEAD = 40, 8, 128
TOKEN_BYTES = LAYERS * 2 * HEADS_KV * HEAD * 2
"""Size of the KV state of one token, in f16: 192 KiB."""
WEIGHT_BYTES_MIN = 8 * 10**9
ALIGNMENT = 32
KIND = gguf.GGMLQuantizationType.Q4_1


def write_sparse(path: Path) -> Path:
    """Write the model to *path* and return it."""
    writer = gguf.GGUFWriter(path, "llama")
    byte_vocabulary(writer)
    writer.add_context_length(32768)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    size = sum(_add(writer, name, shape) for name, shape in _tensors())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + size + 4096)
    return path


def _tensors() -> list[tuple[str, tuple[int, ...]]]:
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (VOCAB_SIZE, EMBEDDING)),
        ("output_norm.weight", (EMBEDDING,)),
        ("output.weight", (VOCAB_SIZE, EMBEDDING)),
    ]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        tensors += [
            (f"{block}.attn_norm.weight", (EMBEDDING,)),
            (f"{block}.attn_q.weight", (HEADS * HEAD, EMBEDDING)),
            (f"{block}.attn_k.weight", (HEADS_KV * HEAD, EMBEDDING)),
            (f"{block}.attn_v.weight", (HEADS_KV * HEAD, EMBEDDING)),
            (f"{block}.attn_output.weight", (EMBEDDING, HEADS * HEAD)),
            (f"{block}.ffn_norm.weight", (EMBEDDING,)),
            (f"{block}.ffn_gate.weight", (FEED_FORWARD, EMBEDDING)),
            (f"{block}.ffn_up.weight", (FEED_FORWARD, EMBEDDING)),
            (f"{block}.ffn_down.weight", (EMBEDDING, FEED_FORWARD)),
        ]
    return tensors


def _add(writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...]) -> int:
    """Add a tensor without data; return its size in the file."""
    kind = KIND if len(shape) > 1 else gguf.GGMLQuantizationType.F32
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
    return int(-(-size // ALIGNMENT) * ALIGNMENT)

"""A model of TinyLlama 1.1B's shape with random weights in Q4_0, and the tokenizer of the bench's
other model: its decoding is bound by memory.

The layers behind the first ones change the residual stream little, so that a copy with only the
first layers often expects the same token. It is the draft model.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np

from .hybrid_model import copy_tokenizer, vocab_size

EMBEDDING, FEED_FORWARD, HEADS, HEADS_KV = 2048, 5632, 32, 4
LAYERS, DRAFT_LAYERS = 22, 2
CONTEXT_TRAINED = 4096
LATER_SCALE = 0.02
"""The scale of what the layers behind the first `DRAFT_LAYERS` add, as a part of the others'."""
_Q4 = gguf.GGMLQuantizationType.Q4_0
_BLOCK, _BLOCK_BYTES = gguf.GGML_QUANT_SIZES[_Q4]
_LEVELS_STD = 4.61
"""The standard deviation of 16 equally probable levels whose distance is 1."""


def write_large(folder: Path, layers: int = LAYERS) -> Path:
    """Write the file with *layers* layers into *folder*, unless it exists; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"random-{layers}-layers-q4_0.gguf"
    if path.exists():
        return path
    scratch = path.with_suffix(".part")
    writer = gguf.GGUFWriter(scratch, "llama")
    copy_tokenizer(writer)
    writer.add_context_length(CONTEXT_TRAINED)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    _add_weights(writer, layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return scratch.rename(path)


def _add_weights(writer: gguf.GGUFWriter, layers: int) -> None:
    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        # The same weights in the models of any number of layers.
        random = np.random.default_rng(zlib.crc32(name.encode()))
        blocks = random.integers(0, 256, (rows, columns // _BLOCK, _BLOCK_BYTES), np.uint8)
        unit = np.array([scale * columns**-0.5 / _LEVELS_STD], np.float16)
        blocks[:, :, :2] = unit.view(np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=_Q4)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", vocab_size(), EMBEDDING, EMBEDDING**0.5)
    matrix("output", vocab_size(), EMBEDDING)
    ones("output_norm", EMBEDDING)
    kv = EMBEDDING // HEADS * HEADS_KV
    for number in range(layers):
        block = f"blk.{number}"
        added = 1.0 if number < DRAFT_LAYERS else LATER_SCALE
        ones(f"{block}.attn_norm", EMBEDDING)
        ones(f"{block}.ffn_norm", EMBEDDING)
        matrix(f"{block}.attn_q", EMBEDDING, EMBEDDING)
        matrix(f"{block}.attn_k", kv, EMBEDDING)
        matrix(f"{block}.attn_v", kv, EMBEDDING)
        matrix(f"{block}.attn_output", EMBEDDING, EMBEDDING, added)
        matrix(f"{block}.ffn_gate", FEED_FORWARD, EMBEDDING)
        matrix(f"{block}.ffn_up", FEED_FORWARD, EMBEDDING)
        matrix(f"{block}.ffn_down", EMBEDDING, FEED_FORWARD, added)

"""A hybrid model of realistic size with random weights: the shape of LFM2-350M, with the tokenizer
of the bench's other model.

Ten of its sixteen layers keep a recurrent state of a short convolution, six have attention. Its
answers are noise, but its steps cost what those of a trained model cost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .machine import MODEL

FILE = "hybrid-350m-q8_0.gguf"
EMBEDDING, FEED_FORWARD, HEADS, HEADS_KV, HEAD = 1024, 4608, 16, 8, 64
ATTENTION_LAYERS = (2, 5, 8, 10, 12, 14)
LAYERS, CACHED_COLUMNS, CONTEXT_TRAINED = 16, 3, 128_000
_ARCHITECTURE = "lfm2"
_Q8 = gguf.GGMLQuantizationType.Q8_0


def write_hybrid(folder: Path) -> Path:
    """Write the model's file (390 MB) into *folder*; return its path."""
    path = folder / FILE
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    copy_tokenizer(writer)
    writer.add_context_length(CONTEXT_TRAINED)
    writer.add_embedding_length(EMBEDDING)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([HEADS_KV * (n in ATTENTION_LAYERS) for n in range(LAYERS)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(CACHED_COLUMNS)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    _add_weights(writer, vocab_size())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocab_size() -> int:
    """Return the number of tokens of that tokenizer."""
    field = gguf.GGUFReader(MODEL).get_field("tokenizer.ggml.tokens")
    assert field is not None
    return len(field.data)


def copy_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add the tokenizer of the bench's other model."""
    for field in gguf.GGUFReader(MODEL).fields.values():
        if field.name.startswith("tokenizer."):
            copy_field(writer, field)


def copy_field(writer: gguf.GGUFWriter, field: gguf.ReaderField) -> None:
    """Add a field of another file."""
    kind, *of_items = field.types
    writer.add_key_value(field.name, field.contents(), kind, of_items[0] if of_items else None)


def _add_weights(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    random = np.random.default_rng(7)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        values = random.standard_normal((rows, columns), np.float32) * scale * columns**-0.5
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, _Q8), raw_dtype=_Q8)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    matrix("token_embd", vocab_size, EMBEDDING, 32.0)
    ones("token_embd_norm", EMBEDDING)
    for number in range(LAYERS):
        block = f"blk.{number}"
        ones(f"{block}.attn_norm", EMBEDDING)
        ones(f"{block}.ffn_norm", EMBEDDING)
        matrix(f"{block}.ffn_gate", FEED_FORWARD, EMBEDDING)
        matrix(f"{block}.ffn_up", FEED_FORWARD, EMBEDDING)
        matrix(f"{block}.ffn_down", EMBEDDING, FEED_FORWARD)
        if number in ATTENTION_LAYERS:
            ones(f"{block}.attn_q_norm", HEAD)
            ones(f"{block}.attn_k_norm", HEAD)
            matrix(f"{block}.attn_q", HEADS * HEAD, EMBEDDING)
            matrix(f"{block}.attn_k", HEADS_KV * HEAD, EMBEDDING)
            matrix(f"{block}.attn_v", HEADS_KV * HEAD, EMBEDDING)
            matrix(f"{block}.attn_output", EMBEDDING, HEADS * HEAD)
        else:
            matrix(f"{block}.shortconv.in_proj", 3 * EMBEDDING, EMBEDDING)
            matrix(f"{block}.shortconv.out_proj", EMBEDDING, EMBEDDING)
            columns: Any = random.standard_normal((EMBEDDING, CACHED_COLUMNS), np.float32)
            writer.add_tensor(f"{block}.shortconv.conv.weight", columns)

"""The bench's model with tokens to fill in the middle: a copy of its file in which tokens that mark
the parts of GitHub issues and files have these roles.

The weights are unchanged, so a step costs as much as with that model. It was not trained to fill in
the middle, and its answers are those of a model that continues a text.
"""

from __future__ import annotations

from pathlib import Path

import gguf

from .hybrid_model import copy_field
from .machine import MODEL

FILE = "smollm2-135m-fim.gguf"
MARKS = {
    "pre": "<issue_start>",
    "suf": "<issue_comment>",
    "mid": "<issue_closed>",
    "sep": "<file_sep>",
}
"""The control token of each role. llama.cpp itself finds the token before the project's name."""
_ARCHITECTURE = gguf.Keys.General.ARCHITECTURE


def write_fim(folder: Path) -> Path:
    """Write the model's file (100 MB) into *folder*; return its path."""
    path = folder / FILE
    reader = gguf.GGUFReader(MODEL)
    fields = {name: f for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, fields.pop(_ARCHITECTURE).contents())
    for field in fields.values():
        copy_field(writer, field)
    texts = fields[gguf.Keys.Tokenizer.LIST].contents()
    kinds = fields[gguf.Keys.Tokenizer.TOKEN_TYPE].contents()
    for role, text in MARKS.items():
        token = texts.index(text)
        assert kinds[token] == gguf.TokenType.CONTROL, text
        writer.add_uint32(f"tokenizer.ggml.fim_{role}_token_id", token)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

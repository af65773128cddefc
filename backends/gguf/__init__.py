"""GGUF files, read without llama.cpp: headers, facts in them, names of split files."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

MAGIC = b"GGUF"
"""The first bytes of each file."""


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts in the header of a model's file; None where it does not state them."""

    title: str | None
    """Its name as its author gives it."""
    architecture: str | None
    """Such as `llama`."""
    quantization: str | None
    """Such as `Q4_K_M`."""
    parameters: int
    """Number of its weights."""
    ctx_size_trained: int | None
    """The context with which it was trained, in tokens."""
    embedding_size: int | None
    """Numbers in the embedding of a token."""
    layers: int | None
    """Number of its layers."""
    nextn_layers: int
    """Number of those among them that predict further tokens (NextN), with which it can draft."""
    license: str | None
    """Its license."""
    license_link: str | None
    """The address of the license's text."""
    chat_template: str | None
    """Its own chat template, which the parameters `chat-template` and `chat-template-file`
    replace; nil above 262144 characters.
    """
    supports_tools: bool
    """Whether that template uses tools."""
    kv_token_bytes_max: int | None
    """KV state of a token; layers that attend to a window take less."""


PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""The name of a part of a split model, as llama-gguf-split writes it."""
PARTS_MAX = 1000


def parts_of(file: Path) -> list[Path]:
    """Return the files of the model that *file* belongs to, in order."""
    part = PART.fullmatch(file.name)
    count = int(part["count"]) if part else 0
    if part is None or not 1 <= count <= PARTS_MAX:
        return [file]
    stem = part["stem"]
    return [file.with_name(f"{stem}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]

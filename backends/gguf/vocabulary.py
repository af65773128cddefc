"""The vocabulary of a GGUF file, and the comparison of a draft model's with that of its model.

A draft is a token id, so both models must mean the same text by it. The rules and numbers are those
of `common_speculative_are_compatible` in llama.cpp's `common/speculative.cpp`.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from . import parts_of
from .facts import READ_BYTES, header_of, opened
from .header import DamagedHeader, GgufHeader, ListEntry

SIZE_DIFFERENCE_MAX = 128
"""Tokens that one of the vocabularies may have more."""
TEXTS_BEGIN = 5
"""The first token whose text is compared. Those before it are special in most vocabularies."""
_SHOWN_BYTES = 40


class VocabularySide(NamedTuple):
    """A model's vocabulary, as a draft model has to fit it."""

    name: str
    kind: str
    """llama.cpp's name of its type (`tokenizer.ggml.model`)."""
    ends: dict[str, object]
    """The tokens bos and eos, if texts get them, and whether they do; None where the file leaves it
    open.
    """
    digest: str
    """Equal digests mean equal tokens."""
    size: int
    texts: tuple[bytes, ...]


def read_vocabulary(file: Path) -> VocabularySide:
    """Return the vocabulary of a model's file, or of a split model's first part. Takes 0.1 s for
    262 k tokens.

    :raises OSError: the file cannot be read.
    :raises DamagedHeader: it is not a GGUF file with a vocabulary.
    """
    file = parts_of(file)[0]
    header = header_of(file)
    with opened(file) as fd:  # an alignment may promise any size
        data = os.pread(fd, min(header.data_begin, READ_BYTES[-1]), 0)
    return vocabulary_of(header, data, file.name)


def vocabulary_of(header: GgufHeader, data: bytes, name: str) -> VocabularySide:
    """Return the vocabulary in the *header* of the file *name*, which is at the beginning of
    *data*.

    :raises DamagedHeader: there is no vocabulary.
    """
    tokens = header.lists.get("tokenizer.ggml.tokens", ListEntry(0, 0, 0))
    kind = header.values.get("tokenizer.ggml.model")
    if not tokens.is_of_texts or not isinstance(kind, str):
        raise DamagedHeader("it has no vocabulary")
    values = header.values
    ends: dict[str, object] = {}
    for end, default in (("bos", True), ("eos", False)):
        ends[f"adds {end}"] = adds = values.get(f"tokenizer.ggml.add_{end}_token")
        is_added = default if adds is None else adds
        ends[end] = values.get(f"tokenizer.ggml.{end}_token_id") if is_added else None
    texts = tuple(tokens.texts(data))
    return VocabularySide(name, kind, ends, header.vocab_hash, len(texts), texts)


def vocabulary_mismatch(model: VocabularySide, draft: VocabularySide) -> str:
    """Return why *draft* cannot draft for *model*, with the values of both, or an empty text.

    A value that one file leaves open is not compared: llama.cpp then decides by the type of the
    vocabulary, which is equal.
    """
    if model.kind != draft.kind:
        return _text("their vocabularies differ in type", model, draft, model.kind, draft.kind)
    for name, value in model.ends.items():
        other = draft.ends[name]
        if value is not None and other is not None and value != other:
            return _text(f"their values of {name!r} differ", model, draft, value, other)
    if abs(model.size - draft.size) > SIZE_DIFFERENCE_MAX:
        what = f"their sizes differ by more than {SIZE_DIFFERENCE_MAX} tokens"
        return _text(what, model, draft, model.size, draft.size)
    if model.digest == draft.digest:
        return ""
    pairs = zip(model.texts, draft.texts, strict=False)
    for token, (text, other_text) in enumerate(islice(pairs, TEXTS_BEGIN, None), TEXTS_BEGIN):
        if text != other_text:
            what = f"token {token} has different texts"
            return _text(what, model, draft, _shown(text), _shown(other_text))
    return ""


def _shown(text: bytes) -> str:
    return ascii(text[:_SHOWN_BYTES].decode("utf-8", "replace"))


def _text(
    what: str, model: VocabularySide, draft: VocabularySide, value: object, other: object
) -> str:
    return f"{what}: {value} in {model.name}, {other} in {draft.name}"

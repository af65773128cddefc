"""The vocabularies of a model and of its draft model are compared as llama.cpp compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.backends.gguf.header import DamagedHeader
from inferd.backends.gguf.vocabulary import (
    SIZE_DIFFERENCE_MAX,
    TEXTS_BEGIN,
    VocabularySide,
    read_vocabulary,
    vocabulary_mismatch,
)
from tests.tiny_gguf import VOCAB_SIZE, write_tiny

ENDS: dict[str, object] = {"adds bos": True, "bos": 1, "adds eos": None, "eos": None}
TEXTS = tuple(b"t%d" % n for n in range(300))


def side(name: str = "draft.gguf", **fields: Any) -> VocabularySide:
    texts = fields.get("texts", TEXTS)
    digest = str(hash(texts))
    found = VocabularySide(name, "llama", ENDS, digest, len(texts), texts)
    return found._replace(**fields)


MODEL = side("model.gguf")


def with_text(token: int) -> tuple[bytes, ...]:
    return (*TEXTS[:token], b"\xff other", *TEXTS[token + 1 :])


@pytest.mark.parametrize(
    "draft",
    [
        side(),
        side(texts=TEXTS + (b"more",) * SIZE_DIFFERENCE_MAX),
        side(texts=TEXTS[:-SIZE_DIFFERENCE_MAX]),
        side(texts=with_text(TEXTS_BEGIN - 1)),
        side(ends=ENDS | {"adds bos": None}),
        side(ends=ENDS | {"eos": 2}),
    ],
    ids=["equal", "more tokens", "fewer tokens", "first texts", "default flag", "unknown eos"],
)
def test_vocabularies_that_fit(draft: VocabularySide) -> None:
    assert vocabulary_mismatch(MODEL, draft) == ""
    assert vocabulary_mismatch(draft, MODEL) == ""


@pytest.mark.parametrize(
    ("draft", "parts"),
    [
        (side(kind="gpt2"), ("in type", "llama in model.gguf", "gpt2 in draft.gguf")),
        (side(ends=ENDS | {"bos": 7}), ("'bos'", "1 in model", "7 in draft")),
        (side(ends=ENDS | {"adds bos": False}), ("'adds bos'", "True in", "False in")),
        (side(size=300 + SIZE_DIFFERENCE_MAX + 1, digest="x"), ("sizes", "300 in", "429 in")),
        (side(texts=with_text(TEXTS_BEGIN)), (f"token {TEXTS_BEGIN}", "'t5'", "'\\ufffd other'")),
        (side(texts=with_text(299)), ("token 299",)),
    ],
)
def test_vocabularies_that_differ(draft: VocabularySide, parts: tuple[str, ...]) -> None:
    text = vocabulary_mismatch(MODEL, draft)
    assert all(part in text for part in parts), text


def test_an_eos_that_texts_get_is_compared() -> None:
    ends = ENDS | {"adds eos": True, "eos": 2}
    assert "'eos'" in vocabulary_mismatch(side(ends=ends), side(ends=ends | {"eos": 3}))


def test_a_files_vocabulary_is_read(tmp_path: Path) -> None:
    files = [write_tiny(kind, tmp_path) for kind in ("llama", "gemma3", "llama-tiles")]
    llama, gemma, tiles = map(read_vocabulary, files)
    assert llama.size == gemma.size == VOCAB_SIZE and llama.texts[3] == b"<0x00>"
    assert llama.ends["bos"] == 1 and llama.ends["eos"] is None
    assert vocabulary_mismatch(llama, gemma) == "" and llama.digest == gemma.digest
    assert tiles.size > VOCAB_SIZE and vocabulary_mismatch(llama, tiles) == ""


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all", b"GGUF" + bytes(64)])
def test_damaged_files_have_no_vocabulary(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(DamagedHeader):
        read_vocabulary(file)

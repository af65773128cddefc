"""Embeddings of llama.cpp equal those of a context used by raw calls alone."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib
from numpy.typing import NDArray

from inferd.backends import Chunk, ModelSpec, estimate_memory, load_model
from inferd.backends.embedder import EMBED_BATCH_TOKENS, EMBED_SLOTS, Embedder
from inferd.backends.errors import BackendError, UnsupportedOperation
from inferd.backends.library import library_log
from inferd.backends.llama.llama_log import capture
from inferd.backends.llama.loading.devices import breakdown
from inferd.backends.llama.loading.memory_estimate import work_bytes
from inferd.backends.llama.model import LlamaModel
from tests.models import short_smollm2
from tests.small_gemma import small_gemma3
from tests.tiny_gguf import write_tiny

CTX_SIZE = 512
EQUAL = 1e-6
"""For the same shape of batches: only the order of additions differs."""
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune,
must be in want of a wife. However little known the feelings or views of such a man may be on his
first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding
families, that he is considered the rightful property of some one or other of their daughters."""
KINDS = ("llama", "gemma3", "mamba", "lfm2")
POOLINGS = ("mean", "cls", "last", "none")


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), slots=2, ctx_size=CTX_SIZE, threads=1)


@contextlib.contextmanager
def loaded(path: Path) -> Iterator[LlamaModel]:
    model = load_model(spec_of(path), lambda _: True)
    assert isinstance(model, LlamaModel)
    try:
        yield model
    finally:
        model.close()


class Bare:
    """A context of llama.cpp that outputs the embedding of each token."""

    def __init__(self, path: Path, tokens_max: int = EMBED_BATCH_TOKENS):
        capture()
        parameters = lib.llama_model_default_params()
        self.model = lib.llama_model_load_from_file(os.fsencode(path), parameters)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = CTX_SIZE, EMBED_SLOTS, True
        params.n_batch = params.n_ubatch = params.n_outputs_max = tokens_max
        params.n_threads = params.n_threads_batch = 1
        params.embeddings, params.pooling_type = True, lib.LLAMA_POOLING_TYPE_NONE
        params.swa_full = False
        self.context = lib.llama_init_from_model(self.model, params)
        self.size = int(lib.llama_model_n_embd_out(self.model))

    def token_vectors(self, tokens: Sequence[int], sizes: Sequence[int]) -> NDArray[np.float32]:
        """Return each token's vector, read one by one, after batches of *sizes*."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(self.context), 0, -1, -1)
        found, position = [], 0
        for size in sizes:
            batch = lib.llama_batch_init(size, 0, 1)
            batch.n_tokens = size
            for i in range(size):
                batch.token[i], batch.pos[i] = tokens[position + i], position + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            assert lib.llama_decode(self.context, batch) == 0
            for i in range(size):
                vector = lib.llama_get_embeddings_ith(self.context, i)
                found.append(np.array(vector[: self.size], np.float32))
            lib.llama_batch_free(batch)
            position += size
        assert position == len(tokens)
        return np.stack(found)

    def close(self) -> None:
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)


@contextlib.contextmanager
def bare_of(path: Path) -> Iterator[Bare]:
    bare = Bare(path)
    try:
        yield bare
    finally:
        bare.close()


def vectors(
    embedder: Embedder, tokens: Sequence[int], sizes: Sequence[int], pooling: str, normalize: int
) -> NDArray[np.float32]:
    embedder.start_text(0, pooling)
    position = 0
    for size in sizes:
        embedder.step([Chunk(0, tokens[position : position + size], position, logits=False)])
        position += size
    found = array("f")
    found.frombytes(embedder.take_embedding(0, normalize))
    return np.array(found, np.float32)


def shapes(count: int) -> list[list[int]]:
    """Return three ways to split *count* tokens: largest batches, equal ones, and uneven ones."""
    large = [EMBED_BATCH_TOKENS] * (count // EMBED_BATCH_TOKENS) + [count % EMBED_BATCH_TOKENS]
    alike = [16] * (count // 16) + [count % 16]
    ragged = [1, 7, 30, 2] + [20] * ((count - 40) // 20) + [(count - 40) % 20]
    return [[size for size in sizes if size] for sizes in (large, alike, ragged)]


def unit(vector: NDArray[np.float32]) -> NDArray[np.float64]:
    plain = vector.astype(np.float64)
    found: NDArray[np.float64] = plain / np.sqrt((plain * plain).sum())
    return found


def assert_as_bare(
    path: Path, poolings: Sequence[str], tokens_max: int = CTX_SIZE, shapes_max: int = 3
) -> None:
    """Compare *poolings* with a bare run: of the same shape, and of others."""
    with loaded(path) as model, bare_of(path) as bare:
        tokens = model.tokenize(TEXT.encode(), special=True, bos=True)[:tokens_max]
        assert len(tokens) > EMBED_BATCH_TOKENS
        embedder = model.embedder()
        expected: dict[str, list[NDArray[np.float64]]] = {}
        first: dict[str, NDArray[np.float32]] = {}
        """The vectors of the first shape."""
        for sizes in shapes(len(tokens))[:shapes_max]:
            token_vectors = bare.token_vectors(tokens, sizes)
            scale = float(np.abs(token_vectors).max())
            pooled = {
                "mean": token_vectors.mean(axis=0),
                "cls": token_vectors[0],
                "last": token_vectors[-1],
            }
            if "none" in poolings:
                found = vectors(embedder, tokens, sizes, "none", -1).reshape(len(tokens), -1)
                assert np.abs(found - token_vectors).max() <= EQUAL * scale
            for pooling in pooled.keys() & poolings:
                vector = pooled[pooling]
                mine = vectors(embedder, tokens, sizes, pooling, 2)
                assert np.abs(mine - unit(vector)).max() <= EQUAL, pooling
                first.setdefault(pooling, mine)
                expected.setdefault(pooling, []).append(unit(vector))
        for pooling, units in expected.items():
            noise = max(float(np.abs(one - units[0]).max()) for one in units[1:])
            for other in units[1:]:
                assert np.abs(first[pooling] - other).max() <= max(2 * noise, EQUAL), pooling


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_model_of_each_memory_embeds_as_a_bare_run(kind: str, tmp_path: Path) -> None:
    assert_as_bare(write_tiny(kind, tmp_path), POOLINGS, 200)


@pytest.mark.model
@pytest.mark.parametrize("path", [short_smollm2, small_gemma3])
def test_a_real_model_embeds_as_a_bare_run(path: object) -> None:
    """In a large batch and a small one; the tiny models cover the other poolings."""
    assert callable(path)
    assert_as_bare(path(), POOLINGS[:1], EMBED_BATCH_TOKENS + 6, shapes_max=2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_the_second_context_is_estimated_before_a_load(
    kind: str, tmp_path: Path
) -> None:
    spec = spec_of(write_tiny(kind, tmp_path))
    with contextlib.closing(estimate_memory(spec)) as estimator:
        need = estimator.need(estimator.shape)
    with loaded(Path(spec.path)) as model:
        embedder = model.embedder()
        shares, work = breakdown(embedder.pointer), work_bytes(embedder.pointer)
    held = work + sum(share.context + share.compute for share in shares)
    outputs = 4 * EMBED_BATCH_TOKENS * (model.info.vocab_size + embedder.info.size)
    assert need.embedding == pytest.approx(held + outputs, abs=30_000), "reported in 0.01 MiB"
    assert need.with_embedding().total == need.total + need.embedding


def test_finished_texts_free_their_cells(tmp_path: Path) -> None:
    with loaded(write_tiny("llama", tmp_path)) as model:
        embedder = model.embedder()
        tokens = [5] * CTX_SIZE
        sizes = [EMBED_BATCH_TOKENS] * (CTX_SIZE // EMBED_BATCH_TOKENS)
        first = vectors(embedder, tokens, sizes, "mean", 2)
        embedder.start_text(3, "mean")
        embedder.step([Chunk(3, tokens[:60], 0, logits=False)])
        embedder.clear_slot(3)
        assert np.array_equal(vectors(embedder, tokens, sizes, "mean", 2), first)


def test_both_contexts_get_the_number_of_threads(tmp_path: Path) -> None:
    with loaded(write_tiny("llama", tmp_path)) as model:
        embedder = None
        for count in (3, 2):
            model.set_threads(count)
            embedder = embedder or model.embedder()
            embedder.start_text(0, "mean")
            embedder.step([Chunk(0, [4, 5], 0, logits=False)])
            assert lib.llama_n_threads(embedder.pointer) == count


# Encoders and reranking models.

TEXTS = ("the first of two texts", "and another one, which is longer than the first")


def pooled_by_llama(
    path: Path, texts: Sequence[Sequence[int]], pooling: int
) -> list[NDArray[np.float32]]:
    """Return the embeddings that llama.cpp itself pools from *texts* in one batch."""
    capture()
    model = lib.llama_model_load_from_file(os.fsencode(path), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.kv_unified = CTX_SIZE, len(texts), True
    params.n_batch = params.n_ubatch = params.n_outputs_max = CTX_SIZE
    params.n_threads = params.n_threads_batch = 1
    params.embeddings, params.pooling_type = True, pooling
    context = lib.llama_init_from_model(model, params)
    batch = lib.llama_batch_init(CTX_SIZE, 0, 1)
    for number, tokens in enumerate(texts):
        for position, token in enumerate(tokens):
            i = batch.n_tokens
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i], batch.n_tokens = number, 1, i + 1
    assert lib.llama_decode(context, batch) == 0
    rank = pooling == lib.LLAMA_POOLING_TYPE_RANK
    size = int(lib.llama_model_n_cls_out(model) if rank else lib.llama_model_n_embd_out(model))
    found = [
        np.array(lib.llama_get_embeddings_seq(context, number)[:size], np.float32)
        for number in range(len(texts))
    ]
    lib.llama_batch_free(batch)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return found


def together(
    embedder: Embedder, texts: Sequence[Sequence[int]], pooling: str
) -> list[NDArray[np.float32]]:
    """Embed *texts* in one batch."""
    for slot in range(len(texts)):
        embedder.start_text(slot, pooling)
    embedder.step([Chunk(slot, tokens, 0, logits=False) for slot, tokens in enumerate(texts)])
    return [
        np.frombuffer(embedder.take_embedding(slot, -1), np.float32) for slot in range(len(texts))
    ]


@pytest.mark.parametrize(
    ("pooling", "number"),
    [
        ("", lib.LLAMA_POOLING_TYPE_MEAN),
        ("mean", lib.LLAMA_POOLING_TYPE_MEAN),
        ("cls", lib.LLAMA_POOLING_TYPE_CLS),
        ("last", lib.LLAMA_POOLING_TYPE_LAST),
    ],
)
def test_an_encoder_embeds_as_llama_cpp_does_by_each_pooling(
    pooling: str, number: int, tmp_path: Path
) -> None:
    path = write_tiny("bert", tmp_path)
    with loaded(path) as model:
        info = model.info.embedding
        assert info is not None and info.whole and info.pooling == "mean"
        assert info.batch_tokens_max == info.tokens_max == CTX_SIZE
        texts = [model.tokenize(text.encode(), special=True, bos=True) for text in TEXTS]
        found = together(model.embedder(), texts, pooling)
    for mine, expected in zip(found, pooled_by_llama(path, texts, number), strict=True):
        assert np.abs(mine - expected).max() <= EQUAL * float(np.abs(expected).max())


def test_a_reranker_gives_a_score(tmp_path: Path) -> None:
    path = write_tiny("bert-rank", tmp_path)
    with loaded(path) as model:
        embedder = model.embedder()
        assert embedder.info.pooling == "rank"
        texts = [model.tokenize(text.encode(), special=True, bos=True) for text in TEXTS]
        found = together(embedder, texts, "")
        with pytest.raises(UnsupportedOperation, match="mean"):
            embedder.start_text(0, "mean")
    assert [score.shape for score in found] == [(1,), (1,)]
    assert found[0] != found[1]
    expected = pooled_by_llama(path, texts, lib.LLAMA_POOLING_TYPE_RANK)
    for mine, score in zip(found, expected, strict=True):
        assert mine == pytest.approx(score, rel=EQUAL)


def test_an_encoder_accepts_a_text_of_full_length_and_refuses_batches_that_would_abort(
    tmp_path: Path,
) -> None:
    with loaded(write_tiny("bert", tmp_path)) as model:
        embedder = model.embedder()
        embedder.start_text(0, "mean")
        embedder.step([Chunk(0, [5] * CTX_SIZE, 0, logits=False)])
        assert len(embedder.take_embedding(0, 2)) == 4 * embedder.info.size
        for wrong in ([5] * (CTX_SIZE + 1), [model.info.vocab_size], [-1], []):
            embedder.start_text(0, "mean")
            with pytest.raises(BackendError):
                embedder.step([Chunk(0, wrong, 0, logits=False)])


def test_the_estimate_of_an_encoder_includes_its_only_context(tmp_path: Path) -> None:
    spec = spec_of(write_tiny("bert", tmp_path))
    with contextlib.closing(estimate_memory(spec)) as estimator:
        need = estimator.need(estimator.shape)
    assert (need.context, need.embedding) == (0, 0)
    with loaded(Path(spec.path)) as model:
        pointer = model.embedder().pointer
        shares, work = breakdown(pointer), work_bytes(pointer)
    outputs = 4 * CTX_SIZE * (model.info.vocab_size + 64)
    held = work + sum(share.context + share.compute for share in shares)
    assert need.compute == pytest.approx(held + outputs, abs=30_000)


@pytest.mark.parametrize("kind", ["llama", "bert", "bert-rank"])
def test_llama_cpp_does_not_warn_of_the_pooling(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's file names no pooling, one for texts, or that of a reranking model."""
    lines: list[str] = []
    monkeypatch.setattr(library_log, "write_line", lambda _, line: lines.append(line))
    spec = spec_of(write_tiny(kind, tmp_path))

    with contextlib.closing(estimate_memory(spec)) as estimate:
        estimate.need(estimate.shape)
    with loaded(Path(spec.path)) as model:
        model.embedder()

    assert [line for line in lines if "pooling" in line] == []

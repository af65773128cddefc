"""A draft model is checked, counted in the estimate of memory, loaded and computed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from msgspec.structs import replace

from inferd.backends import Chunk, MemoryNeed, ModelSpec, estimate_memory
from inferd.backends.errors import (
    BackendError,
    Cancelled,
    InferdError,
    LoadFailed,
    UnsupportedOperation,
)
from inferd.backends.llama.loading import opening
from inferd.backends.llama.loading.loader import load_llama
from tests.backends.tiny import SLOTS, tiny_spec, tokens_of
from tests.tiny_gguf import VOCAB_SIZE, write_tiny

SIZE_PARTS = ("weights", "context", "compute")


def test_the_estimate_counts_the_draft_model(tmp_path: Path) -> None:
    """Its weights, its KV states and its buffers, for the slots and tokens of the model."""
    path, draft = write_tiny("gemma3", tmp_path), write_tiny("llama", tmp_path)
    plain, alone = tiny_spec(path, ctx_size=0), replace(tiny_spec(draft), options={})
    with (
        contextlib.closing(estimate_memory(plain)) as without,
        contextlib.closing(estimate_memory(replace(plain, draft_model=str(draft)))) as drafting,
        contextlib.closing(estimate_memory(alone)) as own,
    ):
        shape = drafting.shape
        needs = []
        for slots, ctx_size in ((4, 4096), (1, 512)):
            smaller = replace(shape, slots=slots, ctx_size=ctx_size)
            need = drafting.need(smaller)
            before, bare = without.need(smaller), own.need(smaller)
            assert all(getattr(need, part) == getattr(before, part) for part in SIZE_PARTS)
            expected = sum(getattr(bare, part) for part in SIZE_PARTS)
            assert expected < need.draft < expected * 1.3
            assert need.total - need.process - need.draft == before.total - before.process
            needs.append(need.draft)
    assert before.draft == 0 and needs[0] > needs[1]


def test_it_predicts_the_tokens_of_each_slot(tmp_path: Path) -> None:
    """With the same file, it predicts what the model samples; each slot has its own state."""
    path = write_tiny("llama", tmp_path)
    spec = replace(tiny_spec(path), draft_model=str(path))
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        draft = model.draft
        assert draft is not None and draft.vocab_size == VOCAB_SIZE
        assert (draft.ctx_size, model.info.draft_model) == (model.info.ctx_size, path.name)
        assert "speculation=draft" not in model.info.unused
        chunks = [Chunk(slot, tokens_of(slot, 10 + slot), 0, 1) for slot in range(SLOTS)]
        model.step(chunks)
        expected = [int(model.logits(slot).argmax()) for slot in range(SLOTS)]
        assert draft.compute(chunks) == expected
        assert draft.compute([Chunk(2, [5], 12, 0)]) == [] and draft.length(2) == 13
        assert draft.trim(2, 11) == 11
        again = Chunk(2, chunks[2].tokens[11:], 11, 1)
        assert draft.compute([again]) == expected[2:3]
        with pytest.raises(BackendError):
            draft.compute([Chunk(0, [VOCAB_SIZE], 10, 1)])
        assert draft.length(0) == 10


def test_predicted_tokens_are_in_the_models_vocabulary(tmp_path: Path) -> None:
    """The draft model has more tokens, of which it may predict none."""
    path, larger = write_tiny("llama", tmp_path), write_tiny("llama-tiles", tmp_path)
    spec = replace(tiny_spec(path), draft_model=str(larger))
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        assert model.draft is not None and model.draft.vocab_size > VOCAB_SIZE
        found, tokens = set[int](), tokens_of(1, 200)
        for place, token in enumerate(tokens):
            found.update(model.draft.compute([Chunk(0, [token], place, 1)]))
        assert max(found) < VOCAB_SIZE


def estimated(spec: ModelSpec) -> MemoryNeed:
    with contextlib.closing(estimate_memory(spec)) as estimator:
        return estimator.need(estimator.shape)


@pytest.mark.parametrize(
    "kind", ["encoder", "missing", "garbage", "mamba", "t5", "recurrent model"]
)
def test_what_cannot_draft_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "KEPT_BYTES_MAX", 1)  # recurrent states are too large
    path, draft = write_tiny("llama", tmp_path), tmp_path / "draft.gguf"
    expected: tuple[type[InferdError], str]
    match kind:
        case "encoder":
            draft = write_tiny("bert", tmp_path)
            expected = UnsupportedOperation, "'tiny-bert.gguf' only makes embeddings"
        case "missing":
            expected = LoadFailed, "'draft.gguf' cannot be read: No such file"
        case "garbage":
            draft.write_bytes(b"GGUF" + bytes(100))
            expected = LoadFailed, "'draft.gguf' cannot be read: "
        case "recurrent model":
            path, draft = write_tiny("mamba", tmp_path), path
            expected = UnsupportedOperation, "'tiny-mamba.gguf'"
        case "t5":
            draft = write_tiny("t5", tmp_path)
            expected = LoadFailed, "tiny-t5.gguf"
        case _:
            draft = write_tiny(kind, tmp_path)
            expected = UnsupportedOperation, f"'tiny-{kind}.gguf': its recurrent state"
    spec = replace(tiny_spec(path), draft_model=str(draft))
    for opens in (estimated, lambda spec: load_llama(spec, lambda _: True)):
        with pytest.raises(expected[0]) as refused:
            opens(spec)
        assert expected[1] in refused.value.message
        assert "draft-model" in refused.value.hint


def test_a_load_is_cancelled_while_the_draft_model_loads(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    spec = replace(tiny_spec(path), draft_model=str(path))
    ends = 0

    def progress(done: float) -> bool:
        nonlocal ends
        ends += done == 1.0
        return ends < 2  # the second end is within the load of the draft model

    with pytest.raises(Cancelled):
        load_llama(spec, progress)

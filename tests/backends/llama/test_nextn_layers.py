"""NextN layers are checked, counted in the estimate of memory, loaded and computed.

The layer of `nextn-hidden` predicts from the hidden state alone: what the model predicted a token
earlier. So its predictions show which state it has got.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from msgspec.structs import replace

from inferd.backends import Chunk, ModelSpec, estimate_memory
from inferd.backends.errors import BackendError, InferdError, InvalidArgument, UnsupportedOperation
from inferd.backends.llama.kv.draft_models import STATES_MAX, NextnDraftModel
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.backends.tiny import BATCH_SIZE, SLOTS, tiny_spec, tokens_of
from tests.tiny_gguf import VOCAB_SIZE, write_tiny


def spec_of(path: Path, **options: Any) -> ModelSpec:
    return replace(tiny_spec(path, **options), nextn=True)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    path = write_tiny("nextn-hidden", tmp_path_factory.mktemp("nextn"))
    with contextlib.closing(load_llama(spec_of(path), lambda _: True)) as found:
        yield found


@pytest.fixture
def model(loaded: LlamaModel) -> LlamaModel:
    for slot in range(SLOTS):
        loaded.trim(slot, 0)
        layers_of(loaded).trim(slot, 0)
    return loaded


def layers_of(model: LlamaModel) -> NextnDraftModel:
    assert isinstance(model.draft, NextnDraftModel)
    return model.draft


def predicted(model: LlamaModel, slot: int) -> int:
    return int(model.logits(slot).argmax())


def test_the_model_says_that_it_has_them(model: LlamaModel) -> None:
    layers = layers_of(model)
    assert model.info.nextn and not model.info.draft_model and layers.name == "mtp"
    assert (layers.vocab_size, layers.ctx_size) == (VOCAB_SIZE, model.info.ctx_size)
    assert "speculation=mtp" not in model.info.unused
    assert "speculation=draft" in model.info.unused


def test_they_compute_with_the_models_state_of_the_token_before(model: LlamaModel) -> None:
    """Several slots in one step, with chunks of different lengths."""
    layers = layers_of(model)
    texts = [tokens_of(slot, 9 + 4 * slot) for slot in range(SLOTS)]
    model.step([Chunk(slot, text, 0, 1) for slot, text in enumerate(texts)])
    expected = [predicted(model, slot) for slot in range(SLOTS)]
    chunks = [Chunk(slot, [*text, 7], 0, 1) for slot, text in enumerate(texts)]
    assert layers.compute(chunks) == expected
    assert [layers.length(slot) for slot in range(SLOTS)] == [len(text) + 1 for text in texts]


def test_drafts_are_computed_again_with_the_models_states(model: LlamaModel) -> None:
    layers, text = layers_of(model), tokens_of(5, 20)
    model.step([Chunk(0, text, 0, 1)])
    first = predicted(model, 0)
    assert layers.compute([Chunk(0, [*text, first], 0, 1)]) == [first]
    for place in range(3):  # the layer repeats itself, with a state of its own
        assert layers.compute([Chunk(0, [first], 21 + place, 1)]) == [first]
        assert layers.length(0) == 21
    model.step([Chunk(0, [first], 20, 1)])
    second = predicted(model, 0)
    assert layers.compute([Chunk(0, [second], 21, 1)]) == [second]
    assert layers.length(0) == 22


def test_states_leave_with_their_tokens(model: LlamaModel) -> None:
    layers, states = layers_of(model), layers_of(model).states
    prefill(model, 0, tokens_of(1, 30))
    assert states.span(0) == range(30)
    model.trim(0, 20)
    assert states.span(0) == range(20)
    kept = states.read(0, 10, 20)
    saved = model.save(0)
    model.swap(0, 1)
    assert not states.span(0) and (states.read(1, 10, 20) == kept).all()
    assert model.restore(1, saved) and not states.span(1)
    model.step([Chunk(1, [9], 20, 1)])
    assert states.span(1) == range(20, 21)
    assert layers.skip(1, 21) == 21
    assert layers.compute([Chunk(1, [8], 21, 1)]) == [predicted(model, 1)]
    model.shift(1, 2, 5)
    assert not states.span(1)


def test_the_states_of_the_last_tokens_are_kept(model: LlamaModel) -> None:
    """The layers skip the tokens before these; a step has more than are kept."""
    layers, size = layers_of(model), STATES_MAX + 3 * BATCH_SIZE
    prefill(model, 0, tokens_of(1, size))
    assert layers.states.span(0) == range(size - STATES_MAX, size)
    begin = layers.skip(0, size)
    assert begin == size - STATES_MAX + 1 == layers.skip(0, size)
    tokens = tokens_of(1, size)
    for place in range(begin, size, BATCH_SIZE):
        part = tokens[place : place + BATCH_SIZE]
        assert layers.compute([Chunk(0, part, place, 0)]) == []
    assert layers.compute([Chunk(0, [5], size, 1)]) == [predicted(model, 0)]
    assert layers.trim(0, 3) == 3 and layers.skip(0, size) == begin


def test_a_wrong_batch_is_refused(model: LlamaModel) -> None:
    layers = layers_of(model)
    wrong: Sequence[Chunk] = (
        Chunk(0, [VOCAB_SIZE], 0, 1),
        Chunk(0, [3], 4, 1),
        Chunk(9, [3], 0, 1),
    )
    for chunk in wrong:
        with pytest.raises(BackendError):
            layers.compute([chunk])
    assert layers.length(0) == 0


def test_the_estimate_counts_them(tmp_path: Path) -> None:
    """Their weights are among the model's; they are not loaded without need."""
    path = write_tiny("nextn", tmp_path)
    tensors = gguf.GGUFReader(path).tensors
    weights = sum(int(t.n_bytes) for t in tensors if t.name.startswith("blk.3."))
    plain = tiny_spec(path)
    with (
        contextlib.closing(estimate_memory(plain)) as without,
        contextlib.closing(estimate_memory(replace(plain, nextn=True))) as drafting,
    ):
        shape, needs = drafting.shape, []
        for slots, ctx_size in ((4, 4096), (1, 512)):
            smaller = replace(shape, slots=slots, ctx_size=ctx_size)
            need, before = drafting.need(smaller), without.need(smaller)
            assert weights <= need.weights - before.weights < weights * 1.05
            assert need.context == before.context and not before.draft
            layer_bytes = before.context // 3  # one layer beside three
            assert layer_bytes < need.draft < layer_bytes + before.compute * 1.3 + (1 << 20)
            needs.append(need.draft)
    assert needs[0] > needs[1]
    with contextlib.closing(load_llama(plain, lambda _: True)) as model:
        assert model.draft is None and not model.info.nextn
        assert "speculation=mtp" in model.info.unused


def estimated(spec: ModelSpec) -> None:
    with contextlib.closing(estimate_memory(spec)):
        pass


def opened(spec: ModelSpec) -> None:
    load_llama(spec, lambda _: True)


def changed(path: Path, key: str, value: int) -> Path:
    """Return the model with another value in its header."""
    reader = gguf.GGUFReader(path, "r+")
    field = reader.get_field(key)
    assert field is not None
    field.parts[field.data[0]][0] = value
    return path


@pytest.mark.parametrize("case", ["none", "architecture", "several", "stripped", "draft model"])
def test_models_that_cannot_draft_so_are_refused(case: str, tmp_path: Path) -> None:
    kind: type[InferdError] = UnsupportedOperation
    path = write_tiny("llama" if case == "none" else "nextn", tmp_path)
    spec = spec_of(path)
    match case:
        case "none":
            reason = "it has none"
        case "architecture":
            path.write_bytes(path.read_bytes().replace(b"glm4moe", b"exaone4"))
            reason = "does not compute those of the architecture 'exaone4'"
        case "several":
            changed(path, "glm4moe.nextn_predict_layers", 2)
            reason = "it has 2, "
        case "stripped":
            path.write_bytes(path.read_bytes().replace(b"nextn.eh_proj", b"nextn.eh_pruj"))
            reason = "its file leaves their tensors out"
        case _:
            spec = replace(spec, draft_model=str(path))
            kind, reason = InvalidArgument, "has a draft model"
    for opens in (estimated, opened):
        with pytest.raises(kind) as refused:
            opens(spec)
        assert reason in refused.value.message and "speculation" in refused.value.hint


def test_an_engine_without_the_calls_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny("nextn", tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp_ext", None)
    monkeypatch.delattr("llama_cpp.llama_cpp_ext", raising=False)
    for opens in (estimated, opened):
        with pytest.raises(UnsupportedOperation, match="no calls for NextN layers") as refused:
            opens(spec_of(path))
        assert "speculation" in refused.value.hint

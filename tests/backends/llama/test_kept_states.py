"""Kept states of recurrent models and hybrids that llama.cpp cannot roll back: once a slot has gone
back, its logits equal those from scratch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.backends import estimate_memory
from inferd.backends.llama.loading import opening
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.backends.tiny import (
    SCRATCH,
    assert_as_from_scratch,
    difference,
    emptied,
    from_scratch,
    load_kind,
    step_slots,
    tiny_spec,
    tokens_of,
)
from tests.tiny_gguf import write_tiny

VOCAB_USED = 128
TEXT = [token % VOCAB_USED for token in tokens_of(5, 70)]
KINDS = {"mamba": "recurrent", "jamba": "hybrid", "rwkv7": "recurrent"}
ARCHITECTURES = {"mamba2-dense": "recurrent"}
"""Models of llama.cpp's generator."""


@pytest.fixture(scope="module", params=[*KINDS, *ARCHITECTURES])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    kind = request.param
    with contextlib.closing(load_kind(kind, tmp_path_factory.mktemp("tiny"))) as found:
        info = found.info
        assert info.keeps_states and not info.rollback and info.drafts_max is None
        assert not info.no_drafts and info.kv_kind == (KINDS | ARCHITECTURES)[kind]
        yield found


@pytest.fixture
def model(loaded: LlamaModel) -> LlamaModel:
    return emptied(loaded)


@pytest.mark.parametrize("dropped", [1, 4, 9])
@pytest.mark.parametrize("other", ["nothing", "a step", "saved"])
def test_a_slot_that_went_back_has_no_trace_of_the_step(
    model: LlamaModel, dropped: int, other: str
) -> None:
    at = prefill(model, 0, TEXT)
    model.keep_states([0])
    step_slots(model, s0=(at, TEXT[:9]))
    assert model.trim(0, at + 9 - dropped) == at == model.length(0)
    slot = 0
    if other == "a step":
        prefill(model, 1, TEXT)
    elif other == "saved":
        slot = 2
        assert model.restore(slot, model.save(0))
    again = [*TEXT[: 9 - dropped], 5, 6]
    step_slots(model, **{f"s{slot}": (at, again)})
    assert_as_from_scratch(model, slot, [*TEXT, *again])
    wrong = [*TEXT, *TEXT[:9], *again]
    assert difference(model.logits(slot), from_scratch(model, wrong)) > 1e-2


def test_a_state_is_kept_for_one_step(model: LlamaModel) -> None:
    at = prefill(model, 0, TEXT)
    assert model.trim(0, at - 1) == 0, "none was kept"
    at = prefill(model, 0, TEXT)
    model.keep_states([0])
    step_slots(model, s0=(at, [5, 6]))
    assert model.trim(0, at + 2) == at + 2, "nothing is dropped"
    step_slots(model, s0=(at + 2, [7]))
    assert model.trim(0, at + 1) == 0 == model.length(0)
    at = prefill(model, 0, TEXT)
    model.keep_states([0])
    step_slots(model, s0=(at, [5, 6]))
    assert model.trim(0, at - 1) == 0, "the kept state has more tokens"
    at = prefill(model, 0, TEXT)
    model.keep_states([0])
    model.trim(0, 0)
    at = prefill(model, 0, TEXT[:20])
    assert model.trim(0, 19) == 0, "the slot has another text"


def test_exchanged_and_restored_slots_have_no_kept_state(model: LlamaModel) -> None:
    for slot in (0, 1):
        prefill(model, slot, TEXT[slot:])
    state = model.save(0)
    model.keep_states([0, 1])
    model.swap(0, 1)
    assert model.trim(0, len(TEXT) - 2) == 0
    assert model.restore(0, state)
    assert model.trim(0, len(TEXT) - 1) == 0


def test_slots_go_back_in_any_order(model: LlamaModel) -> None:
    """A walk of steps with 1 … 9 tokens of each slot, some of which keep their states."""
    numbers = random.Random(12)
    texts: dict[int, list[int]] = {}
    for slot in range(SCRATCH):
        texts[slot] = TEXT[slot : 11 + 20 * slot]
        prefill(model, slot, texts[slot])
    for round_number in range(24):
        slots = sorted(s for s in texts if numbers.random() < 0.8) or [0]
        kept = [s for s in slots if numbers.random() < 0.7]
        model.keep_states(kept)
        chunks = {}
        for slot in slots:
            more = numbers.choices(range(3, VOCAB_USED), k=numbers.randint(1, 9))
            chunks[slot] = (len(texts[slot]), more)
        step_slots(model, **{f"s{slot}": chunk for slot, chunk in chunks.items()})
        numbers.shuffle(slots)
        for slot in slots:
            at, more = chunks[slot]
            keep = at + numbers.randint(0, len(more))
            if slot in kept and keep < at + len(more):
                assert model.trim(slot, keep) == at
            else:
                texts[slot] = [*texts[slot], *more]
        if round_number % 6 == 5:
            model.swap(0, 2)
            texts[0], texts[2] = texts[2], texts[0]
    for slot, text in texts.items():
        step_slots(model, **{f"s{slot}": (len(text), [7])})
        assert_as_from_scratch(model, slot, [*text, 7])


def test_a_slot_that_went_back_is_cut_to_a_checkpoint(model: LlamaModel) -> None:
    at = prefill(model, 0, TEXT)
    checkpoint = model.save_checkpoint(0)
    step_slots(model, s0=(at, TEXT[:4]))
    model.keep_states([0])
    step_slots(model, s0=(at + 4, TEXT[:6]))
    assert model.trim(0, at + 7) == at + 4
    if model.info.kv_kind == "hybrid":
        assert model.restore_checkpoint(0, checkpoint)
        assert model.trim(0, at) == at
    else:
        assert model.restore(0, checkpoint)
    step_slots(model, s0=(at, [8]))
    assert_as_from_scratch(model, 0, [*TEXT, 8])


@pytest.mark.parametrize("kind", ["mamba", "jamba", "lfm2"])
def test_states_that_take_too_much_memory_are_not_kept(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(kind, tmp_path)
    monkeypatch.setattr(opening, "KEPT_BYTES_MAX", 1)
    monkeypatch.setattr(opening, "ROLLBACK_BYTES_MAX", 1)
    with contextlib.closing(load_llama(tiny_spec(path), lambda _: True)) as model:
        info = model.info
        assert not info.keeps_states and not info.rollback
        assert "too large" in info.no_drafts == info.unused["speculation"]
        at = prefill(model, 0, TEXT)
        model.keep_states([0])
        step_slots(model, s0=(at, [5, 6]))
        assert model.trim(0, at + 1) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_counts_the_kept_states(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as those of all slots in the context, at most."""
    spec = tiny_spec(write_tiny(kind, tmp_path))
    found = []
    for most in (opening.KEPT_BYTES_MAX, 1):
        monkeypatch.setattr(opening, "KEPT_BYTES_MAX", most)
        with contextlib.closing(estimate_memory(spec)) as estimator:
            found.append(estimator.need(estimator.shape).context)
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        prefill(model, 0, TEXT)
        state = len(model.save_checkpoint(0))
    assert 0.9 * spec.slots * state < found[0] - found[1] < 4 * spec.slots * state

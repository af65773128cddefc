"""Rollbacks of recurrent states: the logits after dropped tokens equal those from scratch, or the
slot is empty. llama.cpp reports success for states that it has not kept.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

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
from tests.tiny_gguf import EMBEDDING, write_tiny

QWEN = "qwen35-dense"
VOCAB_USED = 128
TEXT = [token % VOCAB_USED for token in tokens_of(3, 70)]
STATE_BYTES = 4 * 4 * EMBEDDING * 2 * 4


@pytest.fixture(scope="module", params=["lfm2", QWEN])
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaModel]:
    with contextlib.closing(load_kind(request.param, tmp_path_factory.mktemp("tiny"))) as found:
        assert found.info.rollback == opening.ROLLBACK_MAX == found.info.drafts_max
        assert not found.info.no_drafts and found.info.kv_kind == "hybrid"
        yield found


@pytest.fixture
def model(loaded: LlamaModel) -> LlamaModel:
    return emptied(loaded)


@pytest.mark.parametrize("dropped", [1, 2, 5, 8])
@pytest.mark.parametrize("other", ["nothing", "a step", "saved"])
def test_dropped_tokens_leave_no_trace(model: LlamaModel, dropped: int, other: str) -> None:
    at = prefill(model, 0, TEXT)
    step_slots(model, s0=(at, TEXT[:9]))
    keep = at + 9 - dropped
    assert model.trim(0, keep) == keep == model.length(0)
    slot = 0
    if other == "a step":
        prefill(model, 1, TEXT)
    elif other == "saved":
        slot = 2
        assert model.restore(slot, model.save(0))
    tokens = [*TEXT, *TEXT[: 9 - dropped], 5, 6]
    step_slots(model, **{f"s{slot}": (keep, [5, 6])})
    assert_as_from_scratch(model, slot, tokens)
    wrong = [*TEXT, *TEXT[:8], 9, 5, 6]
    assert difference(model.logits(slot), from_scratch(model, wrong)) > 1e-2


def test_states_that_are_not_kept_are_not_rolled_back(model: LlamaModel) -> None:
    """A chunk of three tokens has the states before the last two; llama.cpp agrees to drop more."""
    at = prefill(model, 0, TEXT)
    step_slots(model, s0=(at, [5, 6, 7]))
    assert model.trim(0, at) == 0 == model.length(0)
    at = prefill(model, 0, TEXT)
    step_slots(model, s0=(at, TEXT[:20]))
    assert model.trim(0, at + 20 - 9) == 0
    at = prefill(model, 0, TEXT)
    step_slots(model, s0=(at, [5, 6, 7]))
    assert model.trim(0, at + 2) == at + 2
    assert model.trim(0, at + 1) == 0, "a second time"
    at = prefill(model, 0, TEXT)
    step_slots(model, s0=(at, [5, 6, 7]))
    prefill(model, 1, TEXT[:5])
    assert model.trim(0, at + 2) == 0, "after a step of another slot"


def test_streams_of_different_lengths_are_rolled_back_in_any_order(model: LlamaModel) -> None:
    """A walk of steps with 1 … 9 tokens of each slot, a part of which is dropped."""
    numbers = random.Random(11)
    texts: dict[int, list[int]] = {}
    for slot in range(SCRATCH):
        texts[slot] = TEXT[slot : 11 + 20 * slot]
        prefill(model, slot, texts[slot])
    for round_number in range(24):
        slots = [s for s in texts if numbers.random() < 0.8] or [0]
        chunks = {}
        for slot in slots:
            more = numbers.choices(range(3, VOCAB_USED), k=numbers.randint(1, 9))
            chunks[slot] = (len(texts[slot]), more)
            texts[slot] = [*texts[slot], *more]
        step_slots(model, **{f"s{slot}": chunk for slot, chunk in chunks.items()})
        numbers.shuffle(slots)
        for slot in slots:
            keep = len(texts[slot]) - numbers.randint(0, len(chunks[slot][1]) - 1)
            assert model.trim(slot, keep) == keep
            texts[slot] = texts[slot][:keep]
        if round_number % 6 == 5:
            model.swap(0, 2)
            texts[0], texts[2] = texts[2], texts[0]
    for slot, text in texts.items():
        step_slots(model, **{f"s{slot}": (len(text), [7])})
        assert_as_from_scratch(model, slot, [*text, 7])


def test_a_rolled_back_state_is_cut_to_a_checkpoint(model: LlamaModel) -> None:
    at = prefill(model, 0, TEXT)
    checkpoint = model.save_checkpoint(0)
    step_slots(model, s0=(at, TEXT[:6]))
    assert model.trim(0, at + 2) == at + 2
    assert model.restore_checkpoint(0, checkpoint) and model.length(0) == at
    step_slots(model, s0=(at, [8]))
    assert_as_from_scratch(model, 0, [*TEXT, 8])


def test_the_memory_of_earlier_states_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier states of a token take 8 KiB: of 4 slots, with 2 numbers for each of the
    embedding in each of 4 layers.
    """
    spec = tiny_spec(write_tiny("lfm2", tmp_path))
    found = []
    for most in (3 * STATE_BYTES, 2 * STATE_BYTES - 1):
        monkeypatch.setattr(opening, "ROLLBACK_BYTES_MAX", most)
        with contextlib.closing(load_llama(spec, lambda _: True)) as other:
            found.append(other.info.rollback)
    assert found == [3, 0]
    monkeypatch.undo()
    with contextlib.closing(load_llama(structs.replace(spec, batch_size=8), lambda _: True)) as few:
        assert few.info.rollback == 2, "llama.cpp aborts if a micro-batch has too few tokens"
        at = prefill(few, 0, TEXT)
        step_slots(few, s0=(at, [5, 6, 7]))
        assert few.trim(0, at + 1) == at + 1
        step_slots(few, s0=(at + 1, [8]))
        assert_as_from_scratch(few, 0, [*TEXT, 5, 8])

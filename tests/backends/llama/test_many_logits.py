"""Logprobs after many tokens of a chunk equal those of a bare llama.cpp loop, token by token."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from inferd.backends import Chunk
from inferd.backends.errors import BackendError
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.loading.memory_estimate import LlamaMemoryEstimator
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.backends.tiny import (
    BATCH_SIZE,
    NOISE_MAX,
    SLOTS,
    Bare,
    difference,
    tiny_spec,
    tokens_of,
)
from tests.tiny_gguf import VOCAB_SIZE, write_tiny

COUNT = 150


def bare_logprobs(path: Path, tokens: list[int]) -> list[np.ndarray]:
    """Return the logprobs of all tokens after each of *tokens*, decoded one by one."""
    with contextlib.closing(Bare(path)) as bare:
        found = []
        for position, token in enumerate(tokens):
            logits = bare.decode(0, [token], position).astype(np.float64)
            found.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        return found


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("size", [1, 7, BATCH_SIZE])
def test_they_equal_those_of_a_bare_loop(kind: str, size: int, tmp_path: Path) -> None:
    path, tokens = write_tiny(kind, tmp_path), tokens_of(1, COUNT)
    expected = bare_logprobs(path, tokens)
    with contextlib.closing(load_llama(tiny_spec(path), lambda _: True)) as model:
        for begin in range(0, COUNT - 1, size):
            part = tokens[begin : min(begin + size, COUNT - 1)]
            model.step([Chunk(1, part, begin, logits=len(part))])
            for position in range(begin, begin + len(part)):
                token = tokens[position + 1]
                found, wanted = model.probs_after(1, position, token, 4), expected[position]
                assert found.value == pytest.approx(wanted[token], abs=NOISE_MAX)
                top = np.sort(wanted)[::-1][:4]
                assert [value for _, value in found.top] == pytest.approx(top, abs=NOISE_MAX)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_the_logits_of_several_slots_equal_those_of_single_steps(kind: str, tmp_path: Path) -> None:
    """Slots at different depths, with different numbers of logits in one batch."""
    path, sizes, counts = write_tiny(kind, tmp_path), (40, 7, 90), (5, 1, 3)
    texts = [tokens_of(seed, size) for seed, size in enumerate(sizes)]
    with contextlib.closing(load_llama(tiny_spec(path), lambda _: True)) as model:
        expected: dict[tuple[int, int], np.ndarray] = {}
        for slot, tokens in enumerate(texts):
            for position, token in enumerate(tokens):
                model.step([Chunk(slot, [token], position, logits=1)])
                expected[slot, position] = model.logits(slot)
            model.trim(slot, 0)
            prefill(model, slot, tokens[: -counts[slot]])
        chunks = [
            Chunk(slot, tokens[-count:], len(tokens) - count, logits=count)
            for slot, (tokens, count) in enumerate(zip(texts, counts, strict=True))
        ]
        model.step(chunks)
        for chunk in chunks:
            for position in range(chunk.position, chunk.position + chunk.logits):
                found = model.logits(chunk.slot, position)
                assert difference(found, expected[chunk.slot, position]) < NOISE_MAX


def test_each_slot_can_have_as_many_as_the_model_was_loaded_for(tmp_path: Path) -> None:
    """Their memory is estimated, and no more are possible than a batch has tokens."""
    path = write_tiny("llama", tmp_path)
    needs, slots = [], 40
    for wanted, most in ((1, 128), (5, 200), (20, 256)):
        spec = structs.replace(tiny_spec(path, slots, 64), batch_size=256, logits_per_slot=wanted)
        with contextlib.closing(LlamaMemoryEstimator(spec)) as estimator:
            needs.append(estimator.need(estimator.shape).compute)
        with contextlib.closing(load_llama(spec, lambda _: True)) as model:
            assert model.info.logits_max == most
            count = min(wanted, most // slots)
            model.step([Chunk(s, tokens_of(s, count), 0, logits=count) for s in range(slots)])
    assert needs[1] - needs[0] >= (200 - 128) * VOCAB_SIZE * 4
    assert needs[2] - needs[1] >= (256 - 200) * VOCAB_SIZE * 4


def test_the_last_logits_stay_those_to_sample_from(tiny: LlamaModel) -> None:
    tokens = tokens_of(2, 20)
    tiny.step([Chunk(0, tokens, 0, logits=1)])
    expected = tiny.logits(0)
    tiny.trim(0, 0)
    tiny.step([Chunk(0, tokens, 0, logits=20)])
    assert difference(tiny.logits(0), expected) < NOISE_MAX
    expected = tiny.logits(0)
    for position in range(19):
        tiny.probs_after(0, position, tokens[position + 1], 1)
    assert np.array_equal(tiny.logits(0), expected)


def test_more_than_may_have_logits_are_refused_before_llama_cpp_aborts(tmp_path: Path) -> None:
    """The bound is that of the vocabulary, or the number of slots if that is larger."""
    spec = tiny_spec(write_tiny("llama", tmp_path), slots=SLOTS)
    with contextlib.closing(load_llama(spec, lambda _: True)) as model:
        assert model.info.logits_max == BATCH_SIZE
        half = tokens_of(3, BATCH_SIZE // 2)
        chunks = [Chunk(slot, half, 0, logits=len(half)) for slot in range(2)]
        model.step(chunks)
        model._context.logits_max = BATCH_SIZE - 1
        for slot in range(2):
            model.trim(slot, 0)
        with pytest.raises(BackendError, match="at most 63"):
            model.step(chunks)

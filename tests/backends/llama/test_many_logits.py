"""Logprobs after many tokens of a chunk equal those of a bare llama.cpp loop, token by token."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from inferd.backends import Chunk
from inferd.backends.errors import BackendError
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.tiny import (
    BATCH_SIZE,
    NOISE_MAX,
    SLOTS,
    Bare,
    difference,
    tiny_spec,
    tokens_of,
)
from tests.tiny_gguf import write_tiny

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

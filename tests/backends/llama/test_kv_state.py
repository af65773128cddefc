"""After each move of KV state that the engine makes, the logits equal those from scratch."""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends import Chunk
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.backends.tiny import (
    BATCH_SIZE,
    NOISE_MAX,
    SLOTS,
    assert_as_from_scratch,
    difference,
    from_scratch,
    tokens_of,
)
from tests.tiny_gguf import WINDOW

LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 200, 500)


def test_the_shape_of_batches_moves_the_logits_by_less_than_the_bound(tiny: LlamaModel) -> None:
    tokens = tokens_of(1, 300)
    expected = from_scratch(tiny, tokens)
    for size in (1, 7, 33):
        tiny.trim(0, 0)
        for begin in range(0, len(tokens), size):
            part = tokens[begin : begin + size]
            tiny.step([Chunk(0, part, begin, logits=begin + size >= len(tokens))])
        assert difference(tiny.logits(0), expected) < NOISE_MAX / 5


@pytest.mark.parametrize("ago", [2, 20, WINDOW - 2])
def test_a_single_lost_cell_fails_the_comparison(tiny: LlamaModel, kind: str, ago: int) -> None:
    """This shows that the comparison works: llama.cpp does not notice a lost cell."""
    tokens = tokens_of(2, 300)
    prefill(tiny, 0, tokens)
    if kind == "mamba":  # a memory without cells: one token is wrong
        tiny.trim(0, 0)
        tokens[-ago] = tokens[-ago] % 100 + 4
        prefill(tiny, 0, tokens)
        tokens = tokens_of(2, 300)
    else:
        lib.llama_memory_seq_rm(tiny._context.memory, 0, 300 - ago, 301 - ago)
    prefill(tiny, 0, [9], 300)
    tiny.hold_logits(0)
    assert difference(tiny.logits(0), from_scratch(tiny, [*tokens, 9])) > 10 * NOISE_MAX
    with pytest.raises(AssertionError):
        assert_as_from_scratch(tiny, 0, [*tokens, 9])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_state_restored_into_another_slot(tiny: LlamaModel, length: int) -> None:
    tokens, more = tokens_of(3, length), tokens_of(4, 70)
    prefill(tiny, 0, tokens)
    state = tiny.save(0)
    prefill(tiny, 2, tokens_of(5, 90))
    assert tiny.restore(2, state)
    assert tiny.length(2) == length
    prefill(tiny, 2, more, length)
    assert_as_from_scratch(tiny, 2, tokens + more)
    prefill(tiny, 0, more, length)
    assert_as_from_scratch(tiny, 0, tokens + more)


def test_a_fork_into_several_slots_that_continue_together(tiny: LlamaModel) -> None:
    tokens = tokens_of(6, 300)
    prefill(tiny, 0, tokens)
    state = tiny.save(0)
    branches = [tokens_of(10 + slot, 12) for slot in range(SLOTS - 1)]
    assert all(tiny.restore(slot, state) for slot in range(SLOTS - 1))
    for i in range(12):
        tiny.step([Chunk(s, b[i : i + 1], 300 + i, logits=True) for s, b in enumerate(branches)])
    for slot in range(SLOTS - 1):
        tiny.hold_logits(slot)
    for slot, branch in enumerate(branches):
        assert_as_from_scratch(tiny, slot, tokens + branch)


@pytest.mark.parametrize("parked_at", [1, 100, 250])
def test_a_prefill_parked_midway_while_others_decode(tiny: LlamaModel, parked_at: int) -> None:
    tokens, other = tokens_of(7, 330), tokens_of(8, 200)
    prefill(tiny, 1, tokens[:parked_at])
    logits = tiny.logits(1)
    state, parked_row = tiny.save(1), tiny.take_logits(1)
    tiny.trim(1, 0)
    prefill(tiny, 1, other)
    prefill(tiny, 0, other[:150])
    assert tiny.restore(2, state)
    tiny.put_logits(2, parked_row)
    assert np.array_equal(tiny.logits(2), logits)
    for begin in range(0, 330 - parked_at, 30):
        part = tokens[parked_at + begin : parked_at + begin + 30]
        chunks = [
            Chunk(0, [9], 150 + begin // 30, logits=True),
            Chunk(1, [9], 200 + begin // 30, logits=True),
            Chunk(2, part, parked_at + begin, logits=parked_at + begin + 30 >= 330),
        ]
        tiny.step(chunks)
    assert_as_from_scratch(tiny, 2, tokens)


@pytest.mark.parametrize("shared", [30, 100, 128])
def test_a_prefill_cancelled_midway_serves_the_next_prompt(tiny: LlamaModel, shared: int) -> None:
    """The KV state of the cancelled prefill is trimmed to the shared part, or to nothing."""
    tokens = tokens_of(11, 300)
    prefill(tiny, 0, tokens[: 2 * BATCH_SIZE])
    prompt = tokens[:shared] + tokens_of(12, 50)
    kept = tiny.trim(0, shared)
    assert kept in (0, shared) and tiny.length(0) == kept
    prefill(tiny, 0, prompt[kept:], kept)
    assert_as_from_scratch(tiny, 0, prompt)


def rolled_back(model: LlamaModel, length: int, restored: bool) -> int:
    """Return how many tokens less than `trim_min` says a slot can be trimmed to. The states before
    the last tokens of the last step are kept, but not saved.
    """
    last_step = (length - 1) % BATCH_SIZE + 1
    return 0 if restored else min(model.info.rollback, last_step - 1)


@pytest.mark.parametrize("keep", [1, 2, WINDOW, WINDOW + 1, 200, 310, 391, 392, 398, 399])
@pytest.mark.parametrize("restored", [False, True], ids=["computed", "restored"])
def test_a_trim_anywhere(tiny: LlamaModel, keep: int, restored: bool) -> None:
    tokens, more = tokens_of(13, 400), tokens_of(14, 5)
    prefill(tiny, 0, tokens)
    if restored:
        assert tiny.restore(0, tiny.save(0))
    least = tiny.trim_min(0) - rolled_back(tiny, len(tokens), restored)
    kept = tiny.trim(0, keep)
    assert kept == (keep if keep >= least else 0) == tiny.length(0)
    text = tokens[:kept] + more
    prefill(tiny, 0, text[kept:], kept)
    assert_as_from_scratch(tiny, 0, text)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("restored", [False, True], ids=["computed", "restored"])
def test_trim_min_is_exact(tiny: LlamaModel, length: int, restored: bool) -> None:
    tokens = tokens_of(15, length)
    prefill(tiny, 0, tokens)
    if restored:
        assert tiny.restore(0, tiny.save(0))
    state, said = tiny.save(0), tiny.trim_min(0)
    least = said - rolled_back(tiny, length, restored)
    assert 1 <= least <= said <= length
    if least > 1:
        assert tiny.trim(0, least - 1) == 0
        tiny.restore(0, state) if restored else prefill(tiny, 0, tokens)
    assert tiny.trim_min(0) == said
    assert tiny.trim(0, least) == least
    prefill(tiny, 0, tokens_of(16, 3), least)
    assert_as_from_scratch(tiny, 0, tokens[:least] + tokens_of(16, 3))


def test_trim_min_of_each_kind_of_memory(tiny: LlamaModel, kind: str) -> None:
    """A saved state holds only the window, even where the cache holds more."""
    assert tiny.trim_min(0) == 0
    prefill(tiny, 0, tokens_of(17, 500))
    computed = tiny.trim_min(0)
    assert tiny.restore(1, tiny.save(0))
    restored = tiny.trim_min(1)
    expected = {"llama": (1, 1), "gemma3-full": (1, 500)}
    if kind == "gemma3":
        assert WINDOW < computed < 500 == restored
    else:
        assert (computed, restored) == expected.get(kind, (500, 500))


def test_the_facts_of_each_kind(tiny: LlamaModel, kind: str) -> None:
    facts = {
        "llama": ("plain", True),
        "gemma3": ("window", False),
        "gemma3-full": ("window", True),
        "mamba": ("recurrent", False),
        "lfm2": ("hybrid", False),
        "jamba": ("hybrid", False),
    }
    assert (tiny.info.kv_kind, tiny.info.can_shift) == facts[kind]

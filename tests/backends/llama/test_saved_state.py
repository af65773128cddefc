"""After any order of moves a slot's KV state equals one computed from scratch.

A state that does not fit is refused. The models are tiny, in F32, one of each kind of memory;
`tests/tiny_gguf.py` says why.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from inferd.backends import Chunk, InferdError
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import prefill
from tests.backends.moves import make_moves
from tests.backends.tiny import SLOTS, assert_as_from_scratch, tiny_spec, tokens_of
from tests.tiny_gguf import VOCAB_SIZE, WINDOW, write_tiny


def test_trim_keeps_exactly_the_requested_tokens_or_none(tiny: LlamaModel, kind: str) -> None:
    tokens = tokens_of(2, 400)
    prefill(tiny, 0, tokens)
    kept = tiny.trim(0, 390)
    assert kept == (0 if kind in ("mamba", "lfm2", "jamba") else 390)
    rest = tokens_of(3, 20)
    prefill(tiny, 0, tokens[:kept] + rest if not kept else rest, kept)
    assert_as_from_scratch(tiny, 0, tokens[:kept] + rest)


def test_trim_keeps_nothing_if_the_window_has_lost_cells(tiny: LlamaModel, kind: str) -> None:
    tokens = tokens_of(2, 500)
    prefill(tiny, 0, tokens)
    assert tiny.trim(0, 100) == (100 if kind in ("llama", "gemma3-full") else 0)


def test_trim_to_the_present_length_keeps_all(tiny: LlamaModel) -> None:
    tokens = tokens_of(4, 100)
    prefill(tiny, 0, tokens)
    assert tiny.trim(0, 100) == 100
    prefill(tiny, 0, tokens[:5], 100)
    assert_as_from_scratch(tiny, 0, tokens + tokens[:5])


def test_a_restored_window_can_only_be_extended(tiny: LlamaModel, kind: str) -> None:
    """A saved state holds only the window, whatever else the slot had when it was saved."""
    tokens = tokens_of(5, 200)
    prefill(tiny, 0, tokens)
    assert tiny.restore(1, tiny.save(0))
    prefill(tiny, 1, tokens[:9], 200)
    assert_as_from_scratch(tiny, 1, tokens + tokens[:9])
    assert tiny.restore(1, tiny.save(0))
    assert tiny.trim(1, 200 - WINDOW) == (200 - WINDOW if kind == "llama" else 0)


def test_slots_do_not_disturb_each_other_in_one_batch(tiny: LlamaModel) -> None:
    texts = [tokens_of(6 + slot, 30 + slot) for slot in range(3)]
    for begin in range(0, 30, 10):
        tiny.step([Chunk(s, t[begin : begin + 10], begin, False) for s, t in enumerate(texts)])
    tiny.step([Chunk(s, [*t[30:], 9], 30, True) for s, t in enumerate(texts)])
    for slot in range(3):
        tiny.hold_logits(slot)
    for slot, text in enumerate(texts):
        assert_as_from_scratch(tiny, slot, [*text, 9])


@pytest.mark.parametrize("seed", range(3))
def test_after_any_moves_each_slot_equals_one_computed_from_scratch(
    tiny: LlamaModel, seed: int
) -> None:
    make_moves(
        tiny,
        seed,
        tokens_max=700,
        vocab_size=VOCAB_SIZE,
        check=partial(assert_as_from_scratch, tiny),
    )


@pytest.mark.parametrize("damage", ["nothing", "cut", "longer", "magic", "key", "body", "length"])
def test_a_state_that_does_not_fit_leaves_the_slot_empty(tiny: LlamaModel, damage: str) -> None:
    tokens = tokens_of(10, 50)
    prefill(tiny, 0, tokens)
    state = tiny.save(0)
    damaged = {
        "nothing": b"",
        "cut": state[:-7],
        "longer": state + b"x",
        "magic": b"xxxx" + state[4:],
        "key": state[:4] + bytes(16) + state[20:],
        "body": state[:28] + bytes(8) + state[36:],
        "length": state[:20] + b"\x31" + state[21:],
    }[damage]
    assert not tiny.restore(0, damaged)
    prefill(tiny, 0, tokens)
    assert_as_from_scratch(tiny, 0, tokens)


def test_a_state_of_another_layout_does_not_fit(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    models = [
        load_llama(spec, lambda _: True)
        for spec in (tiny_spec(path), tiny_spec(path, slots=2), tiny_spec(path, ctx_size=256))
    ]
    first, fewer_slots, smaller = models
    prefill(first, 0, tokens_of(11, 100))
    state = first.save(0)
    assert not fewer_slots.restore(0, state)
    assert fewer_slots.info.fingerprint != first.info.fingerprint
    # The context's size is not part of the layout: sessions survive a change of it.
    assert smaller.restore(0, state)
    prefill(first, 0, tokens_of(12, 200), 100)
    assert not smaller.restore(0, first.save(0))
    for model in models:
        model.close()


def test_bad_numbers_are_refused_before_llama_cpp_sees_them(tiny: LlamaModel) -> None:
    """llama.cpp would abort the process for each of these."""
    for call in (
        lambda: tiny.trim(SLOTS, 0),
        lambda: tiny.save(-1),
        lambda: tiny.restore(SLOTS, b""),
        lambda: tiny.swap(0, SLOTS),
        lambda: tiny.piece(VOCAB_SIZE),
        lambda: tiny.is_eog(-1),
        lambda: tiny.is_control(1 << 30),
        lambda: tiny.step([Chunk(0, [VOCAB_SIZE], 0, True)]),
        lambda: tiny.step([Chunk(0, [-1], 0, True)]),
        lambda: tiny.step([Chunk(0, [], 0, True)]),
        lambda: tiny.step([Chunk(0, [5] * 65, 0, True)]),
    ):
        with pytest.raises(InferdError):
            call()


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    model = load_llama(tiny_spec(write_tiny("llama", tmp_path)), lambda _: True)
    model.close()
    model.close()

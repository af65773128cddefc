"""The options of the engine reach llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends import Chunk, ModelSpec
from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.loading.loader import load_llama
from inferd.backends.llama.model import LlamaModel
from tests.backends.tiny import tiny_spec, tokens_of
from tests.models import smollm2
from tests.tiny_gguf import write_tiny


def load(path: Path, **options: Any) -> LlamaModel:
    return load_llama(tiny_spec(path, slots=1, ctx_size=256, **options), lambda _: True)


def load_real(**options: Any) -> LlamaModel:
    """Load SmolLM2."""
    spec = ModelSpec(
        name="m",
        path=str(smollm2()),
        slots=2,
        ctx_size=512,
        batch_size=64,
        threads=1,
        options=options,
    )
    return load_llama(spec, lambda _: True)


def logits_after(model: LlamaModel, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    model.step([Chunk(0, tokens, 0, True)])
    found = lib.llama_get_logits_ith(model._context.pointer, -1)
    return np.ctypeslib.as_array(found, (model.info.vocab_size,)).copy()


def test_each_option_of_positions_changes_the_answer_and_the_fingerprint(tmp_path: Path) -> None:
    path, tokens = write_tiny("llama", tmp_path), tokens_of(1, 40)
    plain = load(path)
    expected = logits_after(plain, tokens)
    for options in (
        {"rope-freq-base": 100.0},
        {"rope-freq-scale": 0.5},
        {"rope-scaling": "yarn", "rope-freq-scale": 0.5, "yarn-orig-ctx": 64},
        {"override-kv": ["llama.rope.freq_base=float:100"]},
    ):
        model = load(path, **options)
        assert np.abs(logits_after(model, tokens) - expected).max() > 0.01, options
        assert model.info.fingerprint != plain.info.fingerprint, options
        model.close()
    plain.close()


def test_options_without_an_effect_on_states_keep_the_fingerprint(tmp_path: Path) -> None:
    path, tokens = write_tiny("llama", tmp_path), tokens_of(1, 40)
    plain = load(path)
    model = load(path, mmap=False, mlock=True, numa="distribute", **{"threads-batch": 2})
    assert model.info.fingerprint == plain.info.fingerprint
    difference = np.abs(logits_after(model, tokens) - logits_after(plain, tokens)).max()
    assert difference < 1e-3
    context = model._context.pointer
    assert (lib.llama_n_threads(context), lib.llama_n_threads_batch(context)) == (1, 2)
    model.set_threads(1)
    model.step([Chunk(0, tokens_of(2, 3), len(tokens), True)])
    assert (lib.llama_n_threads(context), lib.llama_n_threads_batch(context)) == (1, 1)
    model.close()
    plain.close()


def test_values_of_the_header_are_replaced(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    model = load(path, **{"override-kv": ["llama.context_length=int:123", "general.name=str:x"]})
    assert model.info.ctx_size_trained == 123
    model.close()


def test_a_full_cache_of_a_window_can_be_shifted(tmp_path: Path) -> None:
    path = write_tiny("gemma3", tmp_path)
    for full in (False, True):
        spec = tiny_spec(path, slots=1, ctx_size=1024, **{"swa-full": full})
        model = load_llama(spec, lambda _: True)
        assert model.info.can_shift == full
        model.close()


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("flash", ["auto", "off"])
def test_blocks_that_do_not_divide_the_heads_are_refused(
    part: str, flash: str, tmp_path: Path
) -> None:
    """Without flash attention llama.cpp would abort; the tiny model's heads have 16 numbers."""
    options = {f"cache-type-{part}": "q8_0", "flash-attn": flash}
    with pytest.raises(InvalidArgument, match=r"heads have 16|needs flash attention"):
        load(write_tiny("llama", tmp_path), **options)


@pytest.fixture(scope="module")
def plain() -> Iterator[LlamaModel]:
    """SmolLM2 without options."""
    model = load_real()
    yield model
    model.close()


@pytest.mark.model
@pytest.mark.parametrize(
    ("k", "v", "flash"),
    [("q8_0", "q8_0", "auto"), ("q4_0", "q5_1", "on"), ("iq4_nl", "f16", "off")],
)
def test_quantized_states_are_saved_restored_and_shifted(
    plain: LlamaModel, k: str, v: str, flash: str
) -> None:
    model = load_real(**{"cache-type-k": k, "cache-type-v": v, "flash-attn": flash})
    assert model.info.fingerprint != plain.info.fingerprint
    tokens = tokens_of(3, 60)
    expected = logits_after(model, tokens)
    model.trim(0, 59)
    state = model.save(0)
    plain.trim(0, 0)
    plain.step([Chunk(0, tokens[:59], 0, False)])
    assert len(state) < (0.9 if v == "f16" else 0.6) * len(plain.save(0))
    model.trim(0, 0)
    assert model.restore(0, state)
    model.step([Chunk(0, tokens[59:], 59, True)])
    again = lib.llama_get_logits_ith(model._context.pointer, -1)
    found = np.ctypeslib.as_array(again, (model.info.vocab_size,))
    assert int(found.argmax()) == int(expected.argmax())
    model.shift(0, 4, 20)
    model.step([Chunk(0, [5], 40, True)])
    model.close()

"""The echo model as a double: each kind of memory, shared cells, an adapter.

Its simulated memory is compared with tiny models that have such a memory.
"""

from __future__ import annotations

import time

import pytest

from inferd.backends import Chunk, LanguageModel, ModelSpec
from inferd.backends.base import KvKind
from inferd.backends.echo.model import EchoModel
from inferd.backends.echo.options import EchoOptions
from inferd.backends.errors import BackendError, InvalidArgument, KvFull, UnsupportedOperation
from inferd.backends.llama.model import LlamaModel
from tests.backends.driving import GREEDY, generate, prefill, sample_tokens
from tests.tiny_gguf import WINDOW

BATCH_SIZE = 16


def echo_of(
    memory: KvKind = "plain", window: int = 8, kv_cells: int = -1, rollback: int = 0
) -> EchoModel:
    spec = ModelSpec(name="echo", slots=4, ctx_size=1024, batch_size=BATCH_SIZE)
    options = EchoOptions(memory=memory, window=window, kv_cells=kv_cells, rollback=rollback)
    return EchoModel(spec, options)


def prompt_of(model: LanguageModel, text: bytes) -> list[int]:
    return model.tokenize(text, special=False, bos=True)


def answers(model: LanguageModel, length: int, keep: int) -> list[int]:
    """Return how a slot of *length* tokens can be trimmed, once computed and once restored."""
    tokens = [65] * length
    prefill(model, 0, tokens)
    state = model.save(0)
    found = [model.length(0), model.trim_min(0), model.trim(0, keep), model.trim_min(0)]
    assert model.restore(1, state)
    found += [model.length(1), model.trim_min(1), model.trim(1, keep), model.trim_min(1)]
    model.trim(0, 0)
    model.trim(1, 0)
    return found


@pytest.mark.parametrize("length", [0, 1, 40, 64, 65, 300])
@pytest.mark.parametrize("less", [0, 1, 7, 9, 60, 200])
def test_echo_trims_like_the_model_that_it_stands_for(
    tiny: LlamaModel, kind: str, length: int, less: int
) -> None:
    """Windows computed at once are left out: both models have one, of different sizes."""
    double = echo_of(tiny.info.kv_kind, window=WINDOW, rollback=tiny.info.rollback)
    keep = max(0, length - less)
    if kind.startswith("gemma3"):
        assert answers(double, length, keep)[4:] == answers(tiny, length, keep)[4:]
    else:
        assert answers(double, length, keep) == answers(tiny, length, keep)
    assert double.info.kv_kind == tiny.info.kv_kind
    assert double.info.rollback == tiny.info.rollback
    assert double.info.can_shift == tiny.info.can_shift or kind == "gemma3-full"


def test_a_step_takes_its_time_once_for_each_length_of_its_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused: list[float] = []
    monkeypatch.setattr(time, "sleep", paused.append)
    model = EchoModel(ModelSpec(name="echo", slots=4, ctx_size=1024), EchoOptions(step_ms=20))
    for count in (1, 5):
        model.step([Chunk(slot, [65] * n, 0, True) for slot, n in enumerate((1, 1, count))])
        for slot in range(3):
            model.trim(slot, 0)
    assert paused == [0.02, 0.04]


def test_a_window_memory_holds_the_window_and_a_batch() -> None:
    model = echo_of("window", window=8)
    prefill(model, 0, [65] * 20)
    assert model.trim_min(0) == 1
    prefill(model, 0, [65] * 80, 20)
    assert model.trim_min(0) == 100 - BATCH_SIZE
    assert model.trim(0, 100 - BATCH_SIZE) == 84
    assert model.trim_min(0) == 84
    assert model.trim(0, 83) == model.length(0) == 0


def test_a_step_on_missing_cells_is_a_bug() -> None:
    model = echo_of("window", window=8)
    prefill(model, 0, [65] * 100)
    del model.slots[0].tokens[70:]
    with pytest.raises(AssertionError, match="missing"):
        prefill(model, 0, [65], 70)


@pytest.mark.parametrize("memory", ["window", "recurrent", "hybrid"])
def test_a_memory_that_cannot_shift_refuses_to(memory: KvKind) -> None:
    model = echo_of(memory)
    prefill(model, 0, [65] * 20)
    with pytest.raises(UnsupportedOperation):
        model.shift(0, 2, 4)
    with pytest.raises(UnsupportedOperation):
        model.reuse(0, [(0, 0, 10)])
    assert model.length(0) == 20


def test_tokens_dropped_by_a_shift_are_not_generated() -> None:
    model = echo_of()
    prompt = prompt_of(model, b"0123456789")
    prefill(model, 0, prompt[:-1])
    model.shift(0, 3, 4)
    position = prefill(model, 0, prompt[-1:], len(prompt) - 5)
    generated = sample_tokens(model, 0, model.sampler(GREEDY, prompt), position, count=6)
    assert bytes(generated) == b"016789"


def test_a_shifted_slot_waits_for_a_step_of_its_own() -> None:
    """This is stricter than llama.cpp, where a decode of any slot is enough."""
    model = echo_of()
    prefill(model, 0, [65] * 20)
    model.shift(0, 2, 4)
    prefill(model, 1, [65] * 5)
    with pytest.raises(BackendError):
        model.save(0)
    prefill(model, 0, [65], 16)
    assert model.save(0)


def test_a_step_without_cells_changes_nothing() -> None:
    model = echo_of(kv_cells=30)
    prompt = prompt_of(model, b"hello there")
    position = prefill(model, 0, prompt)
    prefill(model, 1, [65] * 10)
    steps = model.faults.steps
    with pytest.raises(KvFull):
        model.step([Chunk(1, [65], 10, False), Chunk(2, [65] * 7, 0, False)])
    assert [model.length(slot) for slot in range(4)] == [position, 10, 0, 0]
    assert model.faults.steps == steps
    model.step([Chunk(2, [65] * 7, 0, False)])
    assert not model.restore(3, model.save(1))
    model.trim(1, 0)
    assert bytes(sample_tokens(model, 0, model.sampler(GREEDY, []), position, count=5)) == b"hello"


def test_the_adapter_upper_samples_capitals_and_is_part_of_the_state() -> None:
    model = echo_of()
    prompt = prompt_of(model, b"a-b\xc3\xa4c")
    plain = generate(model, 0, prompt)
    model.set_adapters(("upper",))
    position = prefill(model, 1, prompt)
    state = model.save(1)
    model.set_adapters(())
    prefill(model, 3, [65])
    assert model.restore(2, state)
    model.set_adapters(("upper",))
    generated = sample_tokens(model, 1, model.sampler(GREEDY, prompt), position)
    assert (bytes(plain), bytes(generated)) == (b"a-b\xc3\xa4c", b"A-B\xc3\xa4C")
    prefill(model, 2, generated[:1], position)
    assert bytes(
        sample_tokens(model, 2, model.sampler(GREEDY, []), position + 1, count=5)
    ) == bytes(generated[1:])


def test_a_slot_of_mixed_adapters_is_a_bug() -> None:
    model = echo_of()
    prefill(model, 0, [65] * 3)
    model.set_adapters(("upper",))
    with pytest.raises(AssertionError, match="mixed"):
        prefill(model, 0, [65], 3)
    with pytest.raises(InvalidArgument):
        model.set_adapters(("upper", "nobody's"))
    assert model.adapters.chosen == ("upper",)


@pytest.mark.parametrize("state", [b"", b"\x93", b"\x90", b"\x93\x91\x41\x00\xa1a"])
def test_an_invalid_state_leaves_the_slot_empty(state: bytes) -> None:
    model = echo_of()
    prefill(model, 0, [65] * 3)
    assert not model.restore(0, state)
    assert model.length(0) == 0


def test_a_state_longer_than_the_context_leaves_the_slot_empty() -> None:
    model = echo_of()
    prefill(model, 0, [65] * 300)
    spec = ModelSpec(name="echo", slots=1, ctx_size=200, batch_size=BATCH_SIZE)
    smaller = EchoModel(spec, EchoOptions())
    assert not smaller.restore(0, model.save(0))
    assert smaller.length(0) == 0


def test_another_vocabulary_generates_the_same_text_in_other_tokens() -> None:
    """Tokens of the other vocabulary would generate another text, so a mix-up shows."""
    models = [
        EchoModel(ModelSpec(name="echo", slots=1), EchoOptions(vocabulary=number))
        for number in (0, 7)
    ]
    prompts = [prompt_of(model, "Où ?".encode()) for model in models]
    assert prompts[0] != prompts[1]
    assert len({model.info.vocab_hash for model in models}) == 2
    assert len({model.info.fingerprint for model in models}) == 2
    generated = [generate(m, 0, p, count=5) for m, p in zip(models, prompts, strict=True)]
    assert [b"".join(map(m.piece, t)) for m, t in zip(models, generated, strict=True)] == [
        "Où ?".encode()
    ] * 2


def test_a_history_retokenized_in_another_vocabulary_keeps_its_marks() -> None:
    one, other = (
        EchoModel(ModelSpec(name="echo", slots=1), EchoOptions(vocabulary=number))
        for number in (0, 7)
    )
    history = [*prompt_of(one, b"first"), *one.tokenize(b"first", special=False, bos=False)]
    generated = b"".join(map(one.piece, history))
    again = other.tokenize(generated, special=True, bos=True)
    assert len(again) == len(history)
    assert b"".join(map(other.piece, again)) == generated

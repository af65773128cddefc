"""Probes run on contexts of their own over a loaded model's weights, piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends import Chunk, ModelSpec, estimate_memory, load_model
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.library import library_log
from inferd.backends.llama.loading.devices import breakdown
from inferd.backends.llama.model import LlamaModel
from inferd.backends.llama.probe_runner import (
    CONTEXTS_MAX,
    NEAR_CELLS,
    NEAR_TOKENS,
    LlamaProbeRunner,
    StopFlag,
    layout_of,
)
from inferd.backends.tuning_choice import DEEP_TOKENS, PROBES, Probe, Setting
from tests.backends.tiny import Bare
from tests.sparse_gguf import DEEP, write_sparse
from tests.tiny_gguf import write_tiny

KINDS = ("llama", "gemma3", "mamba", "lfm2")
"""Plain, with a window, recurrent, hybrid."""
PIECES_MAX = 100
BY_NAME = {probe.name: probe for probe in PROBES}
ON, OFF = Setting(flash_attn=True, threads=1), Setting(flash_attn=False, threads=1)


def spec_of(path: Path, slots: int = 16, ctx_size: int = 2048) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), slots=slots, ctx_size=ctx_size, threads=1)


@contextlib.contextmanager
def loaded(path: Path, slots: int = 16, ctx_size: int = 2048) -> Iterator[LlamaModel]:
    model = load_model(spec_of(path, slots, ctx_size), lambda _: True)
    assert isinstance(model, LlamaModel)
    try:
        yield model
    finally:
        model.close()


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[LlamaProbeRunner]:
    with (
        loaded(write_tiny("llama", tmp_path)) as model,
        contextlib.closing(model.probe_runner()) as made,
    ):
        yield made


def seconds_of(runner: LlamaProbeRunner, probe: Probe, setting: Setting) -> float:
    for _ in range(PIECES_MAX):
        seconds = runner.advance(probe, setting)
        if seconds is not None:
            return seconds
    raise AssertionError(f"{probe.name} has no time after {PIECES_MAX} pieces")


@pytest.mark.parametrize("kind", KINDS)
def test_each_probe_has_a_time_with_each_kind_of_attention(kind: str, tmp_path: Path) -> None:
    with (
        loaded(write_tiny(kind, tmp_path)) as model,
        contextlib.closing(model.probe_runner()) as runner,
    ):
        for _ in range(2):
            for probe in runner.probes:
                for setting in (ON, OFF):
                    assert 0 < seconds_of(runner, probe, setting) < 10
        names = {probe.name for probe in runner.probes}
    near = {"decode-1", "decode-4", "decode-16", "prompt"}
    deep = {"deep-1", "deep-step"} if kind in ("llama", "gemma3") else set()
    assert names == near | deep


@pytest.mark.parametrize(
    ("slots", "ctx_size", "names"),
    [
        (1, 2048, {"decode-1", "prompt", "deep-1", "deep-step"}),
        (4, 512, {"decode-1", "decode-4", "prompt"}),
    ],
)
def test_probes_fit_the_models_slots_and_contexts(
    slots: int, ctx_size: int, names: set[str], tmp_path: Path
) -> None:
    with loaded(write_tiny("llama", tmp_path), slots, ctx_size) as model:
        assert {probe.name for probe in model.probe_runner().probes} == names


def test_a_deep_sequence_has_all_its_cells_and_is_cut_back_after_each_step(
    runner: LlamaProbeRunner,
) -> None:
    seconds_of(runner, BY_NAME["deep-step"], OFF)
    (context,) = runner._contexts.values()
    pointer, memory = context._context.pointer, context._context.memory
    per_cell = lib.llama_state_seq_get_size_ext(pointer, 0, 0) / (DEEP_TOKENS + 16)
    assert len(context.state) / NEAR_TOKENS == pytest.approx(per_cell, rel=0.05)
    for _ in range(3):
        seconds_of(runner, BY_NAME["deep-step"], OFF)
        assert lib.llama_memory_seq_pos_max(memory, 0) == NEAR_TOKENS + 16 - 1


def test_near_sequences_decode_behind_the_same_tokens_again(runner: LlamaProbeRunner) -> None:
    for name in ("decode-4", "prompt", "decode-16", "decode-1"):
        seconds_of(runner, BY_NAME[name], ON)
    (context,) = runner._contexts.values()
    lengths = [context._context.length(slot) for slot in range(16)]
    assert lengths == [NEAR_TOKENS + 1] * 16


def test_contexts_have_a_stream_for_each_near_sequence() -> None:
    assert layout_of(BY_NAME["decode-1"], 16) == layout_of(BY_NAME["decode-16"], 16)
    assert layout_of(BY_NAME["prompt"], 4).sequences == 4
    assert layout_of(BY_NAME["decode-4"], 5).cells == NEAR_CELLS
    assert layout_of(BY_NAME["deep-step"], 16).deep


def test_at_most_two_contexts_exist(runner: LlamaProbeRunner) -> None:
    for name in ("decode-1", "deep-1", "decode-1"):
        for setting in (ON, OFF):
            seconds_of(runner, BY_NAME[name], setting)
            assert len(runner._contexts) <= CONTEXTS_MAX
    assert {layout.deep for layout, *_ in runner._contexts} == {False}


def test_a_second_context_of_a_layout_copies_the_computed_tokens(
    runner: LlamaProbeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds_of(runner, BY_NAME["deep-1"], OFF)
    for name in ("decode-1", "decode-4"):
        for setting in (ON, OFF):
            seconds_of(runner, BY_NAME[name], setting)
    (state,) = {s for (layout, *_), s in runner._states.items() if layout.deep}
    runner.advance(BY_NAME["deep-1"], OFF)
    *_, context = runner._contexts.values()
    assert context.state is state
    computed: list[int] = []
    decode = context._context.decode

    def counted(chunks: Sequence[Chunk]) -> dict[int, range]:
        computed.extend(len(chunk.tokens) for chunk in chunks)
        return decode(chunks)

    monkeypatch.setattr(context._context, "decode", counted)
    seconds_of(runner, BY_NAME["deep-1"], OFF)
    assert computed == [1, 1]


def test_the_numbers_of_threads_are_those_of_the_setting(runner: LlamaProbeRunner) -> None:
    seconds_of(runner, BY_NAME["decode-4"], Setting(False, threads=1, threads_batch=2))
    (context,) = runner._contexts.values()
    pointer = context._context.pointer
    assert (lib.llama_n_threads(pointer), lib.llama_n_threads_batch(pointer)) == (1, 2)
    seconds_of(runner, BY_NAME["decode-4"], Setting(False, threads=1))
    assert (lib.llama_n_threads(pointer), lib.llama_n_threads_batch(pointer)) == (1, 1)


def test_the_micro_batch_is_that_of_the_setting(runner: LlamaProbeRunner) -> None:
    seconds_of(runner, BY_NAME["prompt"], Setting(False, threads=1, ubatch=32))
    seconds_of(runner, BY_NAME["prompt"], OFF)
    pointers = [context._context.pointer for context in runner._contexts.values()]
    assert [lib.llama_n_ubatch(pointer) for pointer in pointers] == [32, 128]


def test_a_set_flag_ends_a_step_of_llama_cpp(tmp_path: Path) -> None:
    bare, flag = Bare(write_tiny("llama", tmp_path)), StopFlag()
    flag.watch(bare.context)
    batch = lib.llama_batch_get_one((lib.llama_token * 1)(5), 1)
    assert lib.llama_decode(bare.context, batch) == 0
    flag.set()
    assert lib.llama_decode(bare.context, batch) == 2
    flag.clear()
    assert lib.llama_decode(bare.context, batch) == 0
    bare.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_piece_is_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(library_log, "write_line", lambda level, text: lines.append(text))
    with (
        loaded(write_tiny(kind, tmp_path)) as model,
        contextlib.closing(model.probe_runner()) as runner,
    ):
        lines.clear()
        for number in range(12):
            with monkeypatch.context() as stopped:
                stopped.setattr(runner._stop, "clear", runner._stop.set)
                assert runner.advance(BY_NAME["decode-4"], OFF) is None
            if number > 4:
                seconds_of(runner, BY_NAME["decode-4"], OFF)
        (context,) = runner._contexts.values()
        assert [context._context.length(slot) for slot in range(4)] == [NEAR_TOKENS + 1] * 4
    assert lines == []


def test_a_models_own_context_is_not_touched(tmp_path: Path) -> None:
    with loaded(write_tiny("llama", tmp_path)) as model:
        model.step([Chunk(0, [5, 6, 7], 0, 1)])
        before = model.logits(0)
        with contextlib.closing(model.probe_runner()) as runner:
            seconds_of(runner, BY_NAME["decode-4"], ON)
        model.trim(0, 2)
        model.step([Chunk(0, [7], 2, 1)])
        assert np.abs(model.logits(0) - before).max() < 1e-4


def test_contexts_take_no_more_memory_than_estimated(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    with contextlib.closing(estimate_memory(spec_of(path))) as estimator:
        estimated = estimator.need(estimator.shape).measuring
    with loaded(path) as model, contextlib.closing(model.probe_runner()) as runner:
        most = 0
        for name in ("decode-16", "deep-step"):
            for setting in (ON, OFF):
                seconds_of(runner, BY_NAME[name], setting)
                pointers = [c._context.pointer for c in runner._contexts.values()]
                shares = [share for pointer in pointers for share in breakdown(pointer)]
                states = sum(len(state) for state in runner._states.values())
                most = max(most, states + sum(s.context + s.compute for s in shares))
    assert most <= estimated <= 2 * most


@pytest.mark.parametrize("options", [{"flash-attn": "on"}, {"cache-type-v": "q8_0"}])
def test_no_memory_is_reserved_for_a_model_whose_settings_are_set(
    options: dict[str, str], tmp_path: Path
) -> None:
    file = write_sparse(tmp_path / "deep.gguf", DEEP)
    spec = ModelSpec(name="m", path=str(file), options=options)
    with contextlib.closing(estimate_memory(spec)) as estimator:
        assert estimator.need(estimator.shape).measuring == 0


def test_an_encoder_has_no_probes(tmp_path: Path) -> None:
    with loaded(write_tiny("bert", tmp_path)) as model, pytest.raises(UnsupportedOperation):
        model.probe_runner()

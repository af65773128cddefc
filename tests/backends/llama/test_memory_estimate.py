"""The memory of a model is estimated before anything is allocated."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends import MemoryNeed, ModelSpec, Shape, estimate_memory, load_model
from inferd.backends.errors import LoadFailed
from inferd.backends.llama.loading import opening
from inferd.backends.llama.loading.devices import Share, breakdown, place_layers
from inferd.backends.llama.loading.memory_estimate import (
    WORK_GAP_BYTES,
    LlamaMemoryEstimator,
    total_need,
)
from inferd.backends.llama.loading.opening import context_params, open_context
from tests.models import gemma3, smollm2
from tests.repetitions import FACTOR
from tests.small_gemma import small_gemma3
from tests.sparse_gguf import DEEP, TOKEN_BYTES, WEIGHT_BYTES_MIN, Sizes, write_sparse
from tests.tiny_gguf import EMBEDDING, write_tiny

TOLERANCE = 0.04
MEASURE = """
import sys

import msgspec
from inferd.backends import Chunk, ModelSpec, load_model, estimate_memory
from inferd.backends.memory import return_large_blocks
from inferd.backends.llama.loading import loader
from inferd.backends.memory import resident_bytes
from inferd.scheduler.worker import LARGE_BLOCK_BYTES
from tests.full_context import fill_context, tokens_at_a_time

return_large_blocks(LARGE_BLOCK_BYTES)
spec = msgspec.json.decode(sys.argv[1], type=ModelSpec)
before = resident_bytes()
estimator = estimate_memory(spec)
need = estimator.need(estimator.shape)
estimator.close()
model = load_model(spec, lambda _: True)
model.step([Chunk(0, [5], 0, True)])
most = model.info.logits_max
tokens = [5 + number % 120 for number in range(model.info.batch_size)]
if sys.argv[2] == "computed":
    model.trim(0, 0)
    for length in range(0, model.info.ctx_size, len(tokens)):
        model.step([Chunk(0, tokens, length, min(most, len(tokens)))])
        while model.draft is not None and (done := model.draft.length(0)) < length + len(tokens):
            part = tokens[done - length :][: model.draft.batch_size]
            model.draft.compute([Chunk(0, part, done, 1)])
else:
    # The parts of a batch are computed one after the other, in the same buffers.
    del tokens[tokens_at_a_time(model._context):]
    swa_full = bool(spec.options.get("swa-full"))
    length = fill_context(model._context, len(tokens), swa_full=swa_full)
    model.step([Chunk(0, tokens, length, min(most, len(tokens)))])
for slot in range(1, spec.slots):
    model.step([Chunk(slot, [5], 0, True)])
model._matching.wait()
print(need.total - before, resident_bytes() - before)
"""
Q8_0 = {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}
Q4_0 = {"cache-type-k": "q4_0", "cache-type-v": "q4_0"}
FLASH = {"flash-attn": "on"}
WIDE = Sizes(layers=1, embedding=256, feed_forward=512, heads=32, heads_kv=32, head=16)
"""A model with large work buffers: at 3072 tokens, without `return_large_blocks`, a process takes a
sixth more than estimated."""
Case = tuple[int, int, int, Mapping[str, object]]
"""Slots, tokens of a slot and of a batch, and options of the engine."""
DEEP_CASES: list[Case] = [
    (1, 32768, 512, FLASH),
    (1, 32768, 512, Q8_0),
    (2, 8192, 2048, {"cache-type-k": "f32", "cache-type-v": "bf16", **FLASH}),
    (1, 32768, 512, {}),
    (3, 8192, 256, {"cache-type-k": "q4_0"}),
]
LONG_DEEP_CASES: list[Case] = [
    (1, 32768, 512, Q4_0),
    (4, 8192, 512, {"flash-attn": "on", "cache-type-k": "q8_0"}),
    (2, 8192, 2048, {"cache-type-k": "f32", "cache-type-v": "bf16"}),
]
REAL_CASES: list[tuple[Callable[[], Path], Case]] = [
    (smollm2, (4, 2048, 128, {"mmap": False, **Q8_0})),
    (small_gemma3, (2, 4096, 128, {"swa-full": True})),
]
LONG_CASES: list[tuple[Callable[[], Path], Case]] = [
    (smollm2, (1, 4096, 256, {})),
    (gemma3, (1, 32768, 128, FLASH)),
    (gemma3, (2, 4096, 128, {"swa-full": True})),
    (smollm2, (2, 2048, 512, FLASH)),
    (smollm2, (2, 8192, 512, FLASH)),
    (smollm2, (2, 8192, 512, Q8_0)),
    (smollm2, (2, 8192, 512, Q4_0)),
    (smollm2, (1, 8192, 512, {})),
    (smollm2, (1, 32768, 512, {})),
    (smollm2, (1, 32768, 512, FLASH)),
    (smollm2, (1, 32768, 512, Q8_0)),
    (smollm2, (1, 32768, 512, Q4_0)),
    (gemma3, (2, 2048, 512, {})),
    (gemma3, (2, 4096, 512, {"swa-full": True})),
    (gemma3, (1, 32768, 512, FLASH)),
    (gemma3, (2, 8192, 512, FLASH)),
    (gemma3, (2, 8192, 512, {"swa-full": True})),
    (gemma3, (1, 4096, 512, {"mmap": False})),
    (gemma3, (1, 8192, 512, {})),
    (gemma3, (1, 32768, 512, Q4_0)),
    (gemma3, (1, 32768, 512, {"swa-full": True})),
]


def need_of(spec: ModelSpec, shape: Shape | None = None) -> MemoryNeed:
    with contextlib.closing(estimate_memory(spec)) as estimator:
        return estimator.need(shape or estimator.shape)


def spec_of(path: Path, slots: int = 2, ctx_size: int = 256, batch_size: int = 32) -> ModelSpec:
    return ModelSpec(
        name="m",
        path=str(path),
        slots=slots,
        ctx_size=ctx_size,
        batch_size=batch_size,
        threads=1,
    )


def test_the_need_of_the_echo_model_is_that_of_its_options() -> None:
    options = {"weight_bytes": 1000, "token_bytes": 3}
    spec = ModelSpec(name="e", backend="echo", slots=2, ctx_size=10, options=options)
    assert need_of(spec) == MemoryNeed(weights=1000, context=60)
    assert need_of(spec, Shape(1, 10, 512)).total == 1030


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2", "t5"])
def test_the_sizes_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    """For each kind of memory: its states are in f16, recurrent ones in f32."""
    spec = spec_of(write_tiny(kind, tmp_path), slots=4, ctx_size=512)
    need = need_of(spec)
    model = load_model(spec, lambda _: True)
    assert need.weights == model.info.size_bytes
    model.close()
    assert need.context > 0 and need.compute > 0 and need.process > 10**7
    one = need_of(spec, Shape(1, 512, 32))
    assert need.context == pytest.approx(4 * one.context, abs=30_000), "reported in 0.01 MiB"
    assert need.compute >= one.compute


def test_the_earlier_states_of_recurrent_layers_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the tiny model's layers are recurrent, with 2 numbers for each of the embedding."""
    spec = spec_of(write_tiny("lfm2", tmp_path), slots=64)
    counted = need_of(spec).context
    monkeypatch.setattr(opening, "ROLLBACK_BYTES_MAX", 0)
    monkeypatch.setattr(opening, "KEPT_BYTES_MAX", 0)
    states = 64 * opening.ROLLBACK_MAX * 2 * 2 * EMBEDDING * 4
    assert counted - need_of(spec).context == pytest.approx(states, abs=30_000)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba", "lfm2"])
def test_the_breakdown_matches_the_other_reports_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    """It is read from a C++ map: a wrong layout would show in the numbers, or crash."""
    spec = spec_of(write_tiny(kind, tmp_path), slots=3, ctx_size=512)
    with contextlib.closing(LlamaMemoryEstimator(spec)) as estimator:
        options, model = estimator._options, estimator._model
        estimator._log.clear()
        shaped = estimator.shape.apply_to(spec)
        params = context_params(shaped, options, model)
        context = open_context(shaped, params, model, estimator._log)
        shares = breakdown(context)
        lib.llama_free(context)
        logged = estimator._log.lines()
        assert sum(s.weights for s in shares) == lib.llama_model_size(model)
    assert [s.device for s in shares] == [""] * len(shares)
    states = sum(mebibytes(r"\w+: size = +([\d.]+) MiB", logged))
    assert sum(s.context for s in shares) / 2**20 == pytest.approx(states, abs=0.01)
    compute = sum(mebibytes(r"\w+: +\S+ +compute buffer size = +([\d.]+) MiB", logged))
    assert sum(s.compute for s in shares) / 2**20 == pytest.approx(compute, abs=0.01)


@pytest.mark.parametrize(
    ("sizes", "ctx_size", "batch_size"),
    [(WIDE, 3072, 256), (DEEP, 4096, 512)],
    ids=["wide", "deep"],
)
def test_a_context_that_was_filled_step_by_step_takes_its_estimate(
    sizes: Sizes, ctx_size: int, batch_size: int, tmp_path: Path
) -> None:
    """Its work buffer grows every 256 tokens, and leaves small gaps in the heap."""
    spec = spec_of(write_sparse(tmp_path / "filled.gguf", sizes), 1, ctx_size, batch_size)
    estimated, measured = measure(spec, "computed")
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def test_the_estimate_of_nextn_layers_is_right_within_four_percent(tmp_path: Path) -> None:
    spec = spec_of(write_tiny("nextn", tmp_path), 2, 8192, 512)
    estimated, measured = measure(msgspec.structs.replace(spec, nextn=True), "computed")
    assert estimated == pytest.approx(measured, rel=TOLERANCE)


def words(value: object) -> str:
    """Return a short name of a test's case."""
    name = str(getattr(value, "__name__", value))
    return "-".join(re.findall(r"\w+", name))


@pytest.mark.parametrize("case", DEEP_CASES + LONG_DEEP_CASES * (FACTOR > 1), ids=words)
def test_the_estimate_is_right_within_four_percent_at_full_depth(
    case: Case, tmp_path: Path
) -> None:
    """It is compared with the growth of the process's resident memory once a context is full and
    the last part of its last batch was computed, as many tokens as llama.cpp computes at a time: a
    context's buffers are touched only as far as it is filled.
    """
    assert_estimate_is_right(write_sparse(tmp_path / "deep.gguf", DEEP), *case)


@pytest.mark.model
@pytest.mark.parametrize(("model", "case"), REAL_CASES + LONG_CASES * (FACTOR > 1), ids=words)
def test_the_estimate_of_a_real_model_is_right_within_four_percent(
    model: Callable[[], Path], case: Case
) -> None:
    assert_estimate_is_right(model(), *case)


def assert_estimate_is_right(
    path: Path, slots: int, ctx_size: int, batch_size: int, options: Mapping[str, object]
) -> None:
    spec = spec_of(path, slots, ctx_size, batch_size)
    spec = msgspec.structs.replace(spec, options=dict(options))
    estimated, measured = measure(spec)
    figures = f"estimated {estimated / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB"
    case = f"{path.stem}, {slots} x {ctx_size}, batch {batch_size}, {options}"
    sys.stderr.write(f"{case}: {figures}: {estimated / measured - 1:+.1%}\n")
    assert estimated == pytest.approx(measured, rel=TOLERANCE), figures


@pytest.mark.parametrize(
    ("options", "costs"),
    [(Q8_0, False), (Q4_0, False), (FLASH, False), ({"cache-type-k": "f32"}, True)],
    ids=words,
)
def test_the_bytes_that_options_add_are_reported(
    options: dict[str, object], costs: bool, tmp_path: Path
) -> None:
    spec = spec_of(write_sparse(tmp_path / "deep.gguf", DEEP), 2, 8192, 512)
    need, plain = need_of(msgspec.structs.replace(spec, options=options)), need_of(spec)
    added = need.context + need.compute - plain.context - plain.compute
    assert need.options == added and plain.options == 0
    assert (added > 0) == costs


@pytest.mark.parametrize("slots", [1, 3])
def test_the_work_buffer_holds_all_attention_weights_without_flash_attention(
    slots: int, tmp_path: Path
) -> None:
    """Its size is read from a structure of C: a wrong layout would show."""
    spec = spec_of(write_sparse(tmp_path / "deep.gguf", DEEP), slots, 8192, 128)
    with_flash, without = (
        need_of(msgspec.structs.replace(spec, options={"flash-attn": value})).compute
        for value in ("on", "off")
    )
    weights, mask = DEEP.heads * 128 * 8192, 128 * 8192
    expected = weights * (4 + 2) + mask * (4 - 2) + WORK_GAP_BYTES
    assert without - with_flash == pytest.approx(expected, rel=0.05), "in f32, and again in f16"


def measure(spec: ModelSpec, filling: str = "") -> tuple[int, int]:
    """Return the estimated and the measured growth of a process that loads a model and fills a
    context, without computing its tokens unless *filling* is `computed`.
    """
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, msgspec.json.encode(spec).decode(), filling],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    estimated, measured = (int(word) for word in done.stdout.split())
    return estimated, measured


def mebibytes(pattern: str, lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.match(pattern, line))]


def test_bytes_on_devices_do_not_count_on_the_host() -> None:
    shares = [
        Share("", 10, 20, 3),
        Share("GPU0", 5, 6, 7),
        Share("", 1, 0, 0),
        Share("GPU1", 1, 1, 1),
    ]
    assert total_need([*shares, Share("GPU0", 100, 0, 0)], process=4, output=2, work=1) == (
        MemoryNeed(weights=11, context=20, compute=6, process=4, devices={"GPU0": 118, "GPU1": 3})
    )


def test_without_a_gpu_the_cpu_runs_all_layers(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    for layers in (-1, 0, 1, 99):
        spec = msgspec.structs.replace(
            spec_of(path), n_gpu_layers=layers, main_gpu=3, tensor_split=(1, 2)
        )
        with contextlib.closing(estimate_memory(spec)) as estimator:
            assert estimator.devices == []
            assert estimator.shape.n_gpu_layers == 0
            assert estimator.need(estimator.shape).devices == {}
        model = load_model(spec, lambda _: True)
        assert model.info.n_gpu_layers == 0
        model.close()


@pytest.mark.parametrize(
    ("main_gpu", "tensor_split", "written"),
    [
        (-1, (), (7, lib.LLAMA_SPLIT_MODE_LAYER, 0, None)),
        (1, (), (7, lib.LLAMA_SPLIT_MODE_NONE, 1, None)),
        (-1, (3.0, 2.0), (7, lib.LLAMA_SPLIT_MODE_LAYER, 0, [3.0, 2.0] + [0.0] * 14)),
        (1, (3.0, 2.0), (7, lib.LLAMA_SPLIT_MODE_LAYER, 1, [3.0, 2.0] + [0.0] * 14)),
    ],
)
def test_the_choice_of_devices_reaches_llama_cpp(
    main_gpu: int, tensor_split: tuple[float, ...], written: object
) -> None:
    params = lib.llama_model_default_params()
    spec = ModelSpec(name="m", n_gpu_layers=7, main_gpu=main_gpu, tensor_split=tensor_split)
    place_layers(spec, params)
    split = params.tensor_split[: lib.llama_max_devices()] if params.tensor_split else None
    assert (params.n_gpu_layers, params.split_mode, params.main_gpu, split) == written


def test_the_shape_has_the_defaults_of_the_model(tmp_path: Path) -> None:
    spec = spec_of(write_tiny("llama", tmp_path), ctx_size=0)
    with contextlib.closing(estimate_memory(spec)) as estimator:
        assert estimator.shape == Shape(2, 4096, 32)
    odd = msgspec.structs.replace(spec, ctx_size=257)
    with contextlib.closing(estimate_memory(odd)) as estimator:
        assert estimator.shape == Shape(2, 512, 32)


def test_the_model_of_a_descriptor_is_estimated_and_can_still_be_loaded(tmp_path: Path) -> None:
    path = write_tiny("llama", tmp_path)
    with path.open("rb") as file:
        spec = msgspec.structs.replace(spec_of(path), path="", fd=file.fileno())
        assert need_of(spec).weights == need_of(spec_of(path)).weights
        load_model(spec, lambda _: True).close()
        os.fstat(file.fileno())


def test_a_model_that_cannot_be_loaded_cannot_be_estimated(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="unknown model architecture: 'unheard-of'"):
        need_of(spec_of(write_tiny("unheard-of", tmp_path)))


def test_a_model_of_14_billion_parameters_is_estimated_without_an_allocation(
    tmp_path: Path,
) -> None:
    path = write_sparse(tmp_path / "large.gguf")
    assert path.stat().st_blocks * 512 < 10**6, "the file is to be sparse"
    before = psutil.Process().memory_info().rss
    need = need_of(spec_of(path, slots=4, ctx_size=8192, batch_size=512))
    after = psutil.Process().memory_info().rss
    assert need.weights > WEIGHT_BYTES_MIN
    assert need.context == pytest.approx(4 * 8192 * TOKEN_BYTES, rel=0.001)
    assert after - before < 10**8

"""The process that measures real models."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd.backends import ModelSpec
from inferd.backends.errors import BackendError, LoadFailed, OutOfMemory, UnsupportedOperation
from inferd.backends.llama.measuring.requests import Variant
from inferd.backends.tuning_choice import PROBES
from inferd.daemon.tuning.measured_stages import MeasuringProcess
from tests.models import short_smollm2
from tests.processes import command_of, running_children
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process
FREE = 1 << 40
BY_NAME = {probe.name: probe for probe in PROBES}


@pytest.fixture
def process() -> Iterator[MeasuringProcess]:
    with MeasuringProcess() as started:
        yield started


def spec_of(path: Path, **fields: Any) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), slots=4, threads=1, **fields)


def soon() -> float:
    return time.monotonic() + 60


def test_each_probe_of_a_model_has_a_time_with_each_setting(
    process: MeasuringProcess, tmp_path: Path
) -> None:
    found = process.open_model(spec_of(write_tiny("llama", tmp_path)), FREE)
    assert (found.shape.architecture, found.shape.layers) == ("llama", 3)
    assert {p.name for p in found.probes} == {
        "decode-1", "decode-4", "prompt", "deep-1", "deep-step",
    }  # fmt: skip
    for variant in (Variant(False), Variant(True), Variant(True, 1, 1, 64, "bf16", "f32")):
        for probe in found.probes:
            seconds = process.run_probe(probe, variant, soon())
            assert seconds is not None and 0 < seconds < 10
    process.close_contexts()
    assert process.run_probe(BY_NAME["decode-1"], Variant(False), soon()) is not None


def test_a_probe_is_not_run_after_its_time(process: MeasuringProcess, tmp_path: Path) -> None:
    process.open_model(spec_of(write_tiny("llama", tmp_path)), FREE)
    assert process.run_probe(BY_NAME["deep-1"], Variant(False), time.monotonic()) is None
    assert process.measure_losses([Variant(True, cache_type_k="f32")], time.monotonic()) == []


def test_heads_of_sixteen_numbers_have_no_quantized_states(
    process: MeasuringProcess, tmp_path: Path
) -> None:
    found = process.open_model(spec_of(write_tiny("llama", tmp_path)), FREE)
    assert found.cache_types == ["f16", "f32", "bf16"]


def test_the_loss_of_a_type_of_kv_states_grows_with_its_coarseness(
    process: MeasuringProcess,
) -> None:
    found = process.open_model(spec_of(short_smollm2()), FREE)
    assert {"q8_0", "q4_0"} <= set(found.cache_types)
    types = ("f16", "q8_0", "q4_0")
    variants = [Variant(True, cache_type_k=t, cache_type_v=t) for t in types]
    same, eight, four = process.measure_losses(variants, soon())
    assert same.divergence == 0.0 and same.other_top == 0.0
    assert 0 < 3 * eight.divergence < four.divergence
    assert eight.divergence_error < eight.divergence and four.tokens >= 400
    assert eight.other_top < four.other_top < 1


def test_the_options_of_attention_and_states_do_not_bind_a_measurement(
    process: MeasuringProcess, tmp_path: Path
) -> None:
    options = {"flash-attn": "on", "cache-type-k": "f32"}
    found = process.open_model(spec_of(write_tiny("llama", tmp_path), options=options), FREE)
    assert found.shape.cache_type_k == "f32"
    assert process.run_probe(BY_NAME["deep-1"], Variant(False), soon()) is not None


def test_a_model_that_does_not_fit_is_not_loaded(process: MeasuringProcess, tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="MiB of memory, and 1 MiB are free"):
        process.open_model(spec_of(write_tiny("llama", tmp_path)), 1 << 20)


@pytest.mark.parametrize(
    ("kind", "words"), [("bert", "only makes embeddings"), ("t5", "is an encoder-decoder")]
)
def test_an_encoder_has_nothing_to_measure(
    process: MeasuringProcess, tmp_path: Path, kind: str, words: str
) -> None:
    with pytest.raises(UnsupportedOperation, match=words):
        process.open_model(spec_of(write_tiny(kind, tmp_path)), FREE)


def test_a_damaged_file_is_an_error(process: MeasuringProcess, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(LoadFailed):
        process.open_model(spec_of(path), FREE)


def test_a_process_that_dies_is_an_error(process: MeasuringProcess, tmp_path: Path) -> None:
    process.open_model(spec_of(write_tiny("llama", tmp_path)), FREE)
    (child,) = (
        c for c in running_children() if "inferd.backends.llama.measuring" in str(command_of(c))
    )
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(BackendError, match="has ended with status -9"):
        process.run_probe(BY_NAME["decode-1"], Variant(False), soon())


def test_the_process_ends_with_its_context(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with MeasuringProcess():
        (child,) = set(psutil.Process().children()) - before
    assert not child.is_running()

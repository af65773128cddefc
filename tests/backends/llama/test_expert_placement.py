"""The experts of a model can stay on the CPU while its other weights are on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llama_cpp import llama_cpp as lib

from inferd.backends.engine_options import EngineOptions
from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.loading.devices import place_experts
from inferd.backends.llama.loading.loader import load_llama
from tests.backends.llama.simulated_gpu import NAME
from tests.backends.tiny import NOISE_MAX, tiny_spec
from tests.tiny_gguf import EXPERT_BYTES, write_split, write_tiny

PLACED = """
import json, sys
import msgspec
from inferd.backends import Chunk, ModelSpec, estimate_memory, load_model
from inferd.backends.llama.loading.devices import breakdown
from tests.backends.llama.simulated_gpu import add_simulated_gpu

alive = add_simulated_gpu()
for spec in msgspec.json.decode(sys.argv[1], type=list[ModelSpec]):
    estimator = estimate_memory(spec)
    need = estimator.need(estimator.shape)
    estimator.close()
    model = load_model(spec, lambda _: True)
    model.step([Chunk(0, list(range(5, 60)), 0, True)])
    found = {
        "layers": model.info.n_gpu_layers,
        "fingerprint": model.info.fingerprint,
        "logits": model.logits(0).tolist(),
        "estimated": [need.weights, need.devices],
        "weights": {},
        "on_device": 0,
    }
    for share in breakdown(model._context.pointer):
        place = share.device or "host"
        found["weights"][place] = found["weights"].get(place, 0) + share.weights
        if share.device:
            found["on_device"] += share.weights + share.context + share.compute
    print(json.dumps(found))
    model.close()
"""


def placed(path: Path, *options: dict[str, object]) -> list[dict[str, Any]]:
    """Load the model with a simulated GPU and each of these *options*, and compute a prompt."""
    plain = [tiny_spec(path, slots=1, ctx_size=256, mmap=False, **found) for found in options]
    specs = [msgspec.structs.replace(spec, n_gpu_layers=-1) for spec in plain]
    done = subprocess.run(
        [sys.executable, "-c", PLACED, msgspec.json.encode(specs).decode()],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.process
def test_experts_stay_on_the_host_and_the_rest_on_the_device(tmp_path: Path) -> None:
    path = write_tiny("moe", tmp_path)
    on_device, *others = placed(path, {}, {"cpu-moe": True}, {"n-cpu-moe": 2}, {"n-cpu-moe": 99})
    host, device = on_device["weights"]["host"], on_device["weights"][NAME]
    assert device > 3 * EXPERT_BYTES
    for layers, found in zip((3, 2, 3), others, strict=True):
        moved = layers * EXPERT_BYTES
        assert found["weights"] == {"host": host + moved, NAME: device - moved}
        assert found["layers"] == on_device["layers"] == 4, "the output layer counts"
        assert found["fingerprint"] == on_device["fingerprint"]
        assert found["logits"] == pytest.approx(on_device["logits"], abs=NOISE_MAX), "repacked"
    for found in (on_device, *others):
        estimate = [found["weights"]["host"], {NAME: found["on_device"]}]
        assert found["estimated"] == estimate, "it counts each tensor where it is loaded"


def test_without_a_gpu_experts_are_where_they_were(tmp_path: Path) -> None:
    path = write_tiny("moe", tmp_path)
    fingerprints = set()
    for options in ({}, {"cpu-moe": True}, {"n-cpu-moe": 1}):
        model = load_llama(tiny_spec(path, slots=1, ctx_size=256, **options), lambda _: True)
        fingerprints.add(model.info.fingerprint)
        model.close()
    assert len(fingerprints) == 1


@pytest.mark.parametrize("option", [{"cpu-moe": True}, {"n-cpu-moe": 2}])
def test_a_model_without_experts_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    for path in (write_tiny("llama", tmp_path), write_split(tmp_path)[0]):
        with pytest.raises(InvalidArgument, match="has no experts") as caught:
            load_llama(tiny_spec(path, slots=1, ctx_size=256, **option), lambda _: True)
        assert path.name in caught.value.message and "leave them out" in caught.value.hint


def test_the_first_layers_may_have_no_experts() -> None:
    """As DeepSeek's, whose first layers are dense."""
    tensors = ["blk.0.ffn_up.weight", "blk.1.ffn_up_exps.weight", "blk.10.ffn_up_chexps.weight"]
    params = lib.llama_model_default_params()
    with pytest.raises(InvalidArgument, match="layer 1, counted from 0") as caught:
        place_experts(EngineOptions(n_cpu_moe=1), "m", tensors, params)
    assert "more than 1" in caught.value.hint and not params.tensor_buft_overrides
    place_experts(EngineOptions(n_cpu_moe=2), "m", tensors, params)
    assert params.tensor_buft_overrides

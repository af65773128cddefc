"""The devices that compute graphs: those of the installed engines; others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from inferd import Client
from inferd.backends import ModelSpec
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.onnx.model import find_provider
from inferd.backends.openvino.model import find_device
from inferd.testing import RunningDaemon, running_daemon
from tests.onnx_graphs import affine, write_graphs

MODELS = {
    "plain": 'device = "cpu"',
    "provider": 'device = "CPUExecutionProvider"',
    "cuda": 'device = "CUDA"',
    "remote": 'device = "azure"',
    "ov-plain": 'backend = "openvino"\ndevice = "CPU"',
    "ov-npu": 'backend = "openvino"\ndevice = "npu"',
}
PROVIDERS = ["CUDAExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]


def spec(device: str) -> ModelSpec:
    return ModelSpec(name="m", options={"device": device})


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, dict.fromkeys(MODELS, affine()))
    config = "".join(f"[models.{name}]\n{text}\n" for name, text in MODELS.items())
    with running_daemon(config, models_dir=models) as running:
        yield running


def test_a_graph_is_computed_on_the_device_that_is_set(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client:
        for name in ("plain", "provider", "ov-plain"):
            with client.graph(name) as graph:
                [output] = graph.run_tensors({"a": [[1.0, 2.0]], "b": [[1.0, 2.0]]}).values()
                assert len(output.data) == 8


@pytest.mark.parametrize(
    ("name", "engine", "device"),
    [
        ("cuda", "ONNX Runtime", "cuda"),
        ("remote", "ONNX Runtime", "azure"),
        ("ov-npu", "OpenVINO", "npu"),
    ],
)
def test_a_device_that_the_engine_does_not_have_is_refused(
    daemon: RunningDaemon, name: str, engine: str, device: str
) -> None:
    with Client(daemon.socket) as client:
        with pytest.raises(UnsupportedOperation) as caught:
            client.load_by_name(name)
        assert f"the installed {engine} has no device '{device}'" in caught.value.message
        assert "set `device` to one of cpu" in caught.value.hint
        assert caught.value.data["device"] == device


def test_the_names_of_providers_have_short_forms() -> None:
    for name in ("cuda", "CUDA", "cudaexecutionprovider"):
        assert find_provider(spec(name), PROVIDERS) == "CUDAExecutionProvider"
    assert find_provider(ModelSpec(name="m"), PROVIDERS) == "CPUExecutionProvider"
    for name in ("azure", "AzureExecutionProvider", "rocm", ""):
        with pytest.raises(UnsupportedOperation, match="has no device") as caught:
            find_provider(spec(name), PROVIDERS)
        assert "one of cpu, cuda" in caught.value.hint


def test_the_devices_of_openvino_may_have_numbers() -> None:
    core = SimpleNamespace(available_devices=["CPU", "GPU.0", "GPU.1"])
    for name in ("gpu", "GPU.1", "cpu"):
        assert find_device(spec(name), core) == name.upper()
    for name in ("gpu.2", "gp", "auto"):
        with pytest.raises(UnsupportedOperation, match="has no device"):
            find_device(spec(name), core)

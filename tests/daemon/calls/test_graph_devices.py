"""The devices that compute graphs: those of the installed engines; others are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inferd import Client
from inferd.backends import ModelSpec
from inferd.backends.errors import UnsupportedOperation
from inferd.backends.onnx.model import find_provider
from inferd.backends.openvino.model import find_device
from inferd.cli.monitoring.status_commands import processor_text
from inferd.daemon.config.sources import load_config
from inferd.daemon.doctor.checks.accounts import own_account
from inferd.daemon.doctor.checks.engine_checks import probe_engine
from inferd.daemon.doctor.checks.folders import inspect_models
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
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


def test_the_device_is_part_of_a_models_description(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client:
        client.load_by_name("provider")
        found = {model["name"]: model["device"] for model in client.models()}
        assert [found[name] for name in MODELS] == ["cpu", "cpu", "cuda", "azure", "cpu", "npu"]
        assert found["echo"] == ""
        assert client.show("cuda")["device"] == "cuda"
        samples = client.stats()["metrics"]["graph_info"]
        labels = {"model_name": "provider", "backend": "onnx", "device": "cpu", "value": 1}
        assert labels in samples
    lines = inferd("show", "cuda", socket=daemon.socket).stdout.splitlines()
    assert ["device", "cuda"] in [line.split() for line in lines]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"device": "cuda", "info": {}}, "CUDA"),
        ({"device": "gpu.1", "info": {}}, "GPU.1"),
        ({"device": "cpu", "info": {}}, "100% CPU"),
        ({"device": "", "info": {"n_gpu_layers": 3}}, "3 layers on GPU"),
        ({"info": {"n_gpu_layers": 0}}, "100% CPU"),  # of an older daemon
    ],
)
def test_ps_names_the_device(model: dict[str, Any], text: str) -> None:
    assert processor_text(model) == text


def test_doctor_finds_the_devices_that_an_engine_does_not_have(tmp_path: Path) -> None:
    names = {"a.onnx": ("onnx", "cpu"), "b.onnx": ("onnx", "cuda"), "c.onnx": ("openvino", "npu")}
    write_graphs(tmp_path, {name.removesuffix(".onnx"): affine() for name in names})
    config = tmp_path / "config.toml"
    config.write_text(
        "".join(
            f'[models.{name[0]}]\nfile = "{name}"\nbackend = "{backend}"\ndevice = "{device}"\n'
            for name, (backend, device) in names.items()
        )
    )
    found = inspect_models(
        load_config({"config": config, "models_dir": tmp_path}, {}), own_account()
    )
    paths = [tmp_path / name for name in names]
    assert found.devices == {tmp_path / n: row for n, row in names.items() if row[1] != "cpu"}
    seen = probe_engine(paths, devices=found.devices).files
    assert [bool(file.error) for file in seen] == [False, True, True]
    assert "ONNX Runtime has no device 'cuda'" in seen[1].error and "one of cpu" in seen[1].hint
    assert "OpenVINO has no device 'npu'" in seen[2].error


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

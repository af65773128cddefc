"""One network in ONNX, TensorFlow Lite and a SavedModel folder, on three engines."""

from __future__ import annotations

import math
import shutil
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from inferd import Client, Tensor
from inferd.testing import RunningDaemon, running_daemon
from tools.get_graphs import MISSING, basic_pitch

SAMPLES = 43_844
TOLERANCE = 1e-5
ENGINES = {"onnx": "onnx", "lite": "litert", "saved": "openvino", "other": "openvino"}
"""The backends by the names of models."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    formats, models = basic_pitch(), tmp_path_factory.mktemp("models")
    assert formats is not None, MISSING
    for name in ("onnx", "other"):
        shutil.copy(formats / "nmp.onnx", models / f"{name}.onnx")
    shutil.copy(formats / "nmp.tflite", models / "lite.tflite")
    shutil.copytree(formats / "nmp", models / "saved")
    with running_daemon('[models.other]\nbackend = "openvino"\n', models_dir=models) as running:
        yield running


def sound() -> Tensor:
    """Return two windows with a chord."""
    values = [
        sum(0.2 * math.sin(2 * math.pi * pitch * n / 22_050) for pitch in (220, 277, 330))
        for n in range(2 * SAMPLES)
    ]
    data = struct.pack(f"{len(values)}f", *values)
    return Tensor(data=data, dimensions=[2, SAMPLES, 1], type="fp32")


def test_the_formats_have_the_same_outputs_by_their_names(daemon: RunningDaemon) -> None:
    tensor, found = sound(), dict[str, dict[str, np.ndarray]]()
    with Client(daemon.socket) as client:
        for name, backend in ENGINES.items():
            context = client.init_execution_context(client.load(name))
            shown = client.show(name)
            assert shown["backend"] == backend and shown["info"] is not None
            [declared] = shown["info"]["inputs"]
            assert declared["type"] == "fp32" and declared["shape"][1:] == [SAMPLES, 1]
            outputs = client.compute(context, {declared["name"]: tensor}).outputs
            found[name] = {
                output: np.frombuffer(t.data, np.float32).reshape(t.dimensions)
                for output, t in outputs
            }
            client.set_input(context, 0, tensor)  # by index
            client.compute(context)
            assert client.get_output(context, 0) == outputs[0][1].data
    assert {*found["lite"]} == {*found["saved"]} == {"contour", "note", "onset"}
    assert found["lite"]["contour"].shape == (2, 172, 264)
    for name, arrays in found.items():
        for output, array in arrays.items():
            expected = found["lite"].get(output)
            if expected is None:  # ONNX has other names: the output that is the nearest one
                same = [one for one in found["lite"].values() if one.shape == array.shape]
                expected = min(same, key=lambda one: float(np.abs(one - array).max()))
            assert np.abs(array - expected).max() < TOLERANCE, (name, output)
    assert float(found["lite"]["note"].max()) > 0.5  # it hears the chord

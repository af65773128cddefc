"""Networks that people run, through a daemon and in this process: the outputs are the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import openvino
import pytest
from ai_edge_litert.interpreter import Interpreter
from numpy.typing import NDArray

from inferd import Client
from inferd.backends.openvino.model import engine_core
from inferd.testing import RunningDaemon, running_daemon
from tests.models import magika
from tools.get_graphs import FACE_DETECTION, MINILM, MISSING, NUDENET, RAPIDOCR, SILERO_VAD, Package

Arrays = Mapping[str, NDArray[Any]]
RNG = np.random.default_rng(8)
TOKENS = 32


class Case(NamedTuple):
    """A graph's file, its inputs, and what computes it in this process."""

    file: Callable[[], Path]
    inputs: Arrays
    compute: Callable[[Path, Arrays], Arrays]
    backend: str = ""


def by_onnxruntime(file: Path, inputs: Arrays) -> Arrays:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(inputs)), strict=True))


def by_openvino(file: Path, inputs: Arrays) -> Arrays:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
    request = engine_core().compile_model(str(file), "CPU", settings).create_infer_request()
    for name, array in inputs.items():
        request.set_tensor(name, openvino.Tensor(array))
    request.infer()
    outputs = request.model_outputs
    return {output.any_name: request.get_tensor(output).data.copy() for output in outputs}


def by_litert(file: Path, inputs: Arrays) -> Arrays:
    interpreter = Interpreter(model_path=str(file), num_threads=1)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], inputs[detail["name"]])
    interpreter.invoke()
    details = interpreter.get_output_details()
    return {one["name"]: interpreter.get_tensor(one["index"]).copy() for one in details}


def of_package(package: Package, name: str) -> Callable[[], Path]:
    def find() -> Path:
        assert package.found is not None, MISSING
        return package.found / name

    return find


def picture(*shape: int) -> NDArray[Any]:
    return RNG.random(shape, np.float32)


def text(rows: int) -> Arrays:
    return {
        "input_ids": RNG.integers(1000, 30_000, (rows, TOKENS)),
        "attention_mask": np.ones((rows, TOKENS), np.int64),
        "token_type_ids": np.zeros((rows, TOKENS), np.int64),
    }


FIND, READ = "ch_PP-OCRv4_det_infer.onnx", "ch_PP-OCRv4_rec_infer.onnx"
SOUND = {
    "input": picture(1, 576),
    "state": picture(2, 1, 128),
    "sr": np.array(16_000, np.int64),
}
BYTES = {"bytes": RNG.integers(0, 257, (3, 2048), np.int32)}
FRONT, BACK = "face_detection_front.tflite", "face_detection_back.tflite"
CASES = {
    "magika": Case(magika, BYTES, by_onnxruntime),
    "magika-openvino": Case(magika, BYTES, by_openvino, "openvino"),
    "minilm": Case(of_package(MINILM, "model.onnx"), text(2), by_onnxruntime),
    "minilm-openvino": Case(of_package(MINILM, "model.onnx"), text(2), by_openvino, "openvino"),
    "silero": Case(of_package(SILERO_VAD, "silero_vad.onnx"), SOUND, by_onnxruntime),
    "nudenet": Case(
        of_package(NUDENET, "320n.onnx"), {"images": picture(1, 3, 320, 320)}, by_onnxruntime
    ),
    "find": Case(of_package(RAPIDOCR, FIND), {"x": picture(1, 3, 320, 320)}, by_onnxruntime),
    "read": Case(of_package(RAPIDOCR, READ), {"x": picture(1, 3, 48, 320)}, by_onnxruntime),
    "front": Case(of_package(FACE_DETECTION, FRONT), {"input": picture(1, 128, 128, 3)}, by_litert),
    "back": Case(of_package(FACE_DETECTION, BACK), {"input": picture(1, 256, 256, 3)}, by_litert),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models, tables = tmp_path_factory.mktemp("models"), list[str]()
    for name, case in CASES.items():
        shutil.copy(case.file(), models / f"{name}{case.file().suffix}")
        backend = f'backend = "{case.backend}"\n' if case.backend else ""
        tables.append(f"[models.{name}]\nthreads = 1\n{backend}")
    with running_daemon("".join(tables), models_dir=models) as running:
        yield running


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_engine(daemon: RunningDaemon, name: str) -> None:
    case = CASES[name]
    expected = case.compute(case.file(), case.inputs)
    with Client(daemon.socket) as client, client.graph(name) as graph:
        found = graph.run(case.inputs)
        again = graph.run(case.inputs)
    assert found.keys() == expected.keys()
    for output, array in expected.items():
        assert array.size and np.isfinite(array).all()
        np.testing.assert_array_equal(found[output], array)
        np.testing.assert_array_equal(again[output], array)

"""Graphs that OpenVINO computes in this process: formats, types, shapes, states and refusals."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from inferd.backends import GraphModel, ModelSpec, estimate_memory, load_model
from inferd.backends.errors import (
    BackendError,
    InferdError,
    InvalidArgument,
    LoadFailed,
    UnsupportedOperation,
)
from inferd.backends.openvino import model as openvino_model
from inferd.backends.tensors import ARRAY_TYPES, Tensor, TensorInfo
from tests.backends.graph_models import (
    TYPES,
    check_bools_of_a_client,
    check_cancelled_load,
    check_cancelling,
    check_output_bound,
    check_outputs_stay,
    check_shapes,
    computed_beside_change,
    floats,
    load_graph,
    share_of_caller,
)
from tests.ir_graphs import bounded, save, strings, sum_so_far, write_ir
from tests.onnx_graphs import affine, graph, identity, square, write_graphs


def loaded(folder: Path, data: bytes, suffix: str = ".xml", lanes: int = 1) -> GraphModel:
    if suffix == ".xml":
        write_ir(folder, {"g": data})
    else:
        write_graphs(folder, {"g": data})
    return load_file(folder / f"g{suffix}", lanes)


def load_file(file: Path, lanes: int = 1) -> GraphModel:
    spec = ModelSpec(name="g", backend="openvino", path=str(file), threads=lanes, lanes=lanes)
    return load_graph(spec, openvino_model.OpenVinoModel)


SIGNALS_BESIDE_GRAPHS = """
import signal, sys
from pathlib import Path
from tests.backends.openvino.test_model import load_file

first, second = (load_file(Path(sys.argv[1])) for _ in range(2))
first.close()
del first
second.close()
del second
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
signal.raise_signal(signal.SIGUSR1)
"""


@pytest.mark.process
def test_python_handles_signals_once_several_graphs_have_ended(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    command = [sys.executable, "-c", SIGNALS_BESIDE_GRAPHS, str(tmp_path / "g.xml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "handled\n"), ended.stderr


@pytest.mark.parametrize("suffix", [".xml", ".onnx"])
def test_outputs_are_computed_in_each_shape(tmp_path: Path, suffix: str) -> None:
    found = loaded(tmp_path, affine(), suffix)
    assert [one.name for one in found.info.inputs] == ["a", "b"]
    check_shapes(found)
    found.close()


@pytest.mark.parametrize("kind", ARRAY_TYPES)
def test_tensors_of_each_type_keep_their_bytes(tmp_path: Path, kind: str) -> None:
    found = loaded(tmp_path, identity(kind, shape=["n", "m"]), ".onnx")
    size = np.dtype(ARRAY_TYPES[kind]).itemsize
    data = {"bool": b"\1\0"}.get(kind) or bytes(range(1, 17))
    if kind in ("i64", "u64"):  # OpenVINO computes with 32 bits
        data = struct.pack("2q", 1, (1 << 31) - 1)
    tensor = Tensor(data, (2, len(data) // size // 2), TYPES[kind])
    assert found.compute([("x0", tensor)]) == [("y0", tensor)]
    empty = Tensor(b"", (0, 3), TYPES[kind])
    assert found.compute([("0", empty)]) == [("y0", empty)]


@pytest.mark.parametrize("kind", ["i32", "fp32"])
def test_a_clients_memory_is_copied_before_the_engine_computes(tmp_path: Path, kind: str) -> None:
    found = loaded(tmp_path, identity(kind), ".onnx")
    assert isinstance(found, openvino_model.OpenVinoModel)
    request = found._lanes[0]
    assert computed_beside_change(found, request, "_request", "start_async", kind) == b"\1" * 64


def test_bools_in_a_clients_memory_are_checked_as_they_are_computed(tmp_path: Path) -> None:
    check_bools_of_a_client(loaded(tmp_path, identity("bool"), ".onnx"))


@pytest.mark.parametrize("count", [3, 1 << 19])
def test_outputs_stay_when_the_next_ones_are_computed(tmp_path: Path, count: int) -> None:
    check_outputs_stay(loaded(tmp_path, affine()), count)


@pytest.mark.parametrize("kind", ["i64", "u64"])
def test_integers_of_more_than_32_bits_are_refused(tmp_path: Path, kind: str) -> None:
    found = loaded(tmp_path, identity(kind), ".onnx")
    for number in (1 << 31, 1 << 40):
        tensor = Tensor(struct.pack("2q", 1, number), (2,), TYPES[kind])
        with pytest.raises(InvalidArgument, match=f"got {number}, and OpenVINO computes"):
            found.compute([("x0", tensor)])


def test_scalars_pass(tmp_path: Path) -> None:
    found = loaded(tmp_path, identity("fp64", "i64", shape=[]))
    number = Tensor(struct.pack("d", 1.5), (), TYPES["fp64"])
    count = Tensor(struct.pack("q", 7), (), TYPES["i64"])
    outputs = found.compute([("x0", number), ("x1", Tensor(count.data, (1,), TYPES["i64"]))])
    assert outputs == [("y0", number), ("y1", count)]


def test_a_model_is_loaded_from_descriptors(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    files = [os.open(tmp_path / f"g.{end}", os.O_RDONLY) for end in ("xml", "bin")]
    spec = ModelSpec(name="g", backend="openvino", fd=files[0], weights_fd=files[1])
    found = load_model(spec, lambda _: True)
    assert isinstance(found, openvino_model.OpenVinoModel)
    one = floats(1, 2, dimensions=(1, 2))
    assert found.compute([("a", one), ("b", one)]) == [("y", floats(3, 6, dimensions=(1, 2)))]
    for file in files:
        os.close(file)


def test_names_ranges_and_other_names(tmp_path: Path) -> None:
    save(bounded(), tmp_path / "g.xml")
    found = load_file(tmp_path / "g.xml")
    assert found.info.inputs == (TensorInfo("x", "fp32", ("1..4", 2)),)
    assert [one.name for one in found.info.outputs] == ["y"]
    two = floats(1, 2, dimensions=(1, 2))
    for name in ("x", "other_x", "0"):
        assert found.compute([(name, two)]) == [("y", floats(-1, -2, dimensions=(1, 2)))]
    with pytest.raises(InvalidArgument, match="OpenVINO refuses an input"):
        found.compute([("x", floats(*range(10), dimensions=(5, 2)))])
    assert found.compute([("x", two)]) == [("y", floats(-1, -2, dimensions=(1, 2)))]


def test_a_wrong_shape_and_a_missing_input_are_refused_and_not_computed(tmp_path: Path) -> None:
    found = loaded(tmp_path, affine())
    one = floats(1, 2, dimensions=(1, 2))
    found.compute([("a", one), ("b", one)])
    for inputs in (
        [("a", floats(1, 2, 3, dimensions=(1, 3))), ("b", one)],
        [("a", one)],
        [("a", one), ("b", Tensor(bytes(16), (1, 2), TYPES["fp64"]))],
    ):
        with pytest.raises(InvalidArgument):
            found.compute(inputs)


def test_no_byte_of_a_tensor_gets_into_the_memory_or_the_answer_of_another(tmp_path: Path) -> None:
    """OpenVINO writes a later input into the memory of an earlier one if it is passed otherwise."""
    found = loaded(tmp_path, identity("u8", shape=["n", "m"]), lanes=2)
    found.add_lane()
    assert isinstance(found, openvino_model.OpenVinoModel)
    for size in (64, 1, 4096, 2, 64):
        marks = (0xA5, 0x5A)
        tensors = [Tensor(bytes([mark]) * size * 2, (2, size)) for mark in marks]
        for lane, tensor in enumerate(tensors):
            assert found.new_computation([("x0", tensor)]).run(lane) == [("y0", tensor)]
        for lane, mark in enumerate(marks):
            request = found._lanes[lane]
            assert request is not None
            [(array, _)] = request._inputs
            assert array.tobytes() == bytes([mark]) * size * 2


def test_a_state_is_not_seen_by_the_next_computation(tmp_path: Path) -> None:
    save(sum_so_far(), tmp_path / "g.xml")
    found = load_file(tmp_path / "g.xml")
    one = floats(1, dimensions=(1, 1))
    assert [found.compute([("x", one)]) for _ in range(3)] == [[("y", one)]] * 3


def test_a_computation_that_has_not_begun_can_be_cancelled(tmp_path: Path) -> None:
    check_cancelling(loaded(tmp_path, identity("u8")))


def test_a_failed_computation_is_an_error_and_the_next_one_works(tmp_path: Path) -> None:
    found = loaded(tmp_path, affine())
    two, three = (Tensor(bytes(8 * n), (n, 2), TYPES["fp32"]) for n in (2, 3))
    for _ in range(2):
        with pytest.raises(BackendError, match="computation failed"):
            found.compute([("a", two), ("b", three)])
        assert found.compute([("a", two), ("b", two)])[0][1].dimensions == (2, 2)


def test_outputs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output_bound(loaded(tmp_path, identity("u8")), monkeypatch)


def test_floating_point_numbers_are_computed_as_they_are(tmp_path: Path) -> None:
    """By default OpenVINO computes in bfloat16, which has eight bits of a number."""
    weights = onnx.helper.make_tensor(
        "w", onnx.TensorProto.FLOAT, [64, 64], struct.pack("4096f", *[1 / 3] * 4096), raw=True
    )
    data = graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", "fp32", ["n", 64])],
        [("y", "fp32", ["n", 64])],
        [weights],
    )
    found = loaded(tmp_path, data)
    [(_, y)] = found.compute([("x", floats(*[1 + 2**-10] * 64, dimensions=(1, 64)))])
    assert struct.unpack("64f", y.data) == pytest.approx([64 / 3 * (1 + 2**-10)] * 64, rel=1e-6)


def test_strings_are_refused_at_the_load(tmp_path: Path) -> None:
    save(strings(), tmp_path / "g.xml")
    with pytest.raises(UnsupportedOperation, match="'x' of 'g' is of type string"):
        load_file(tmp_path / "g.xml")


def test_a_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ir(tmp_path, {"g": affine()})
    monkeypatch.setitem(sys.modules, "openvino", None)
    monkeypatch.delitem(sys.modules, openvino_model.__name__)
    with pytest.raises(UnsupportedOperation, match="'openvino' cannot be used here") as caught:
        load_file(tmp_path / "g.xml")
    assert "install" in caught.value.hint and "[openvino]" in caught.value.hint


def test_files_that_openvino_does_not_read_are_failed_loads(tmp_path: Path) -> None:
    write_ir(tmp_path, {"whole": affine()})
    (tmp_path / "g.xml").write_text('<?xml version="1.0"?><net name="a" version="11"><x')
    (tmp_path / "h.xml").write_bytes((tmp_path / "whole.xml").read_bytes())  # without weights
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    for name in ("g.xml", "h.xml", "saved_model.pb", "missing.xml"):
        with pytest.raises(LoadFailed) as caught:
            load_file(tmp_path / name)
        assert caught.value.message.isprintable() and caught.value.hint


def test_an_unknown_operator_is_named(tmp_path: Path) -> None:
    unknown = graph(
        [onnx.helper.make_node("Nonsense", ["x"], ["y"])],
        [("x", "u8", ["n"])],
        [("y", "u8", ["n"])],
    )
    with pytest.raises(LoadFailed, match=r"OpenVINO does not load 'g': .*Nonsense"):
        loaded(tmp_path, unknown, ".onnx")


def test_a_load_is_cancelled(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    check_cancelled_load("openvino", tmp_path / "g.xml")


def test_memory_is_estimated_from_all_files(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    (tmp_path / "g.bin").write_bytes(bytes(1 << 20))
    folder = tmp_path / "saved"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(bytes(1 << 10))
    (folder / "variables" / "variables.data-00000-of-00001").write_bytes(bytes(1 << 20))
    for path in (tmp_path / "g.xml", folder / "saved_model.pb"):
        spec = ModelSpec(name="g", backend="openvino", path=str(path))
        estimator = estimate_memory(spec)
        need = estimator.need(estimator.shape)
        assert 2.1 * (1 << 20) < need.weights < 2.2 * (1 << 20)
        assert need.total == need.weights + need.process
        estimator.close()
    with pytest.raises(InferdError):
        estimate_memory(ModelSpec(name="g", backend="openvino", path=str(tmp_path / "no.xml")))


def test_a_graph_computes_in_a_thread_of_openvino(tmp_path: Path) -> None:
    found, size = loaded(tmp_path, square(), ".onnx"), 512
    matrix = ("x", floats(*[1.0] * size**2, dimensions=(size, size)))
    assert not found.computes_in_caller, "its caller's CPU time is not its cost"
    assert share_of_caller(found, [matrix]) < 0.5
    found.close()

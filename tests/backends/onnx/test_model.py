"""Graphs in ONNX in this process: all types, cancelled runs, and graphs that are refused."""

from __future__ import annotations

import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from msgspec.structs import replace
from onnxruntime.capi.onnxruntime_pybind11_state import EPFail

from inferd.backends import GraphModel, ModelSpec, estimate_memory, graphs
from inferd.backends.errors import (
    BackendError,
    Cancelled,
    InvalidArgument,
    LoadFailed,
    TooLarge,
    UnsupportedOperation,
)
from inferd.backends.onnx import model as onnx_model
from inferd.backends.tensors import ARRAY_TYPES, FLOATS, NamedTensor, Tensor, pack_strings
from tests.backends.graph_models import (
    TYPES,
    check_bools_of_a_client,
    check_cancelled_load,
    check_output_bound,
    check_outputs_stay,
    check_strings_of_a_client,
    computed_beside_change,
    floats,
    load_graph,
    share_of_caller,
)
from tests.onnx_graphs import affine, graph, identity, loop, square


def loaded(folder: Path, data: bytes) -> GraphModel:
    (folder / "g.onnx").write_bytes(data)
    spec = ModelSpec(name="g", backend="onnx", path=str(folder / "g.onnx"))
    return load_graph(spec, onnx_model.OnnxModel)


def times(count: int) -> NamedTensor:
    return "times", Tensor(struct.pack("q", count), (), TYPES["i64"])


def test_outputs_are_computed_from_inputs(tmp_path: Path) -> None:
    model = loaded(tmp_path, affine())
    a = Tensor(struct.pack("2f", 1, 2), (1, 2), TYPES["fp32"])
    [(name, y)] = model.compute([("a", a), ("b", a)])
    assert (name, y.dimensions, struct.unpack("2f", y.data)) == ("y", (1, 2), (3.0, 6.0))
    model.close()


@pytest.mark.parametrize("kind", ARRAY_TYPES)
def test_tensors_of_each_type_keep_their_bytes(tmp_path: Path, kind: str) -> None:
    model = loaded(tmp_path, identity(kind, shape=["n", "m"]))
    size = 2 if kind in ("fp16", "bf16") else 1
    data = {"bool": b"\1\0"}.get(kind) or bytes(range(1, 17)) * size
    element = len(Tensor(b"").data) or next(
        n for n in (1, 2, 4, 8) if np.dtype(ARRAY_TYPES[kind]).itemsize == n
    )
    tensor = Tensor(data, (2, len(data) // element // 2), TYPES[kind])
    assert model.compute([("x0", tensor)]) == [("y0", tensor)]
    empty = Tensor(b"", (0, 3), TYPES[kind])
    assert model.compute([("0", empty)]) == [("y0", empty)]


def test_bools_in_a_clients_memory_are_checked_as_they_are_computed(tmp_path: Path) -> None:
    check_bools_of_a_client(loaded(tmp_path, identity("bool")))


def test_strings_in_a_clients_memory_are_read(tmp_path: Path) -> None:
    check_strings_of_a_client(loaded(tmp_path, identity("string")))


@pytest.mark.parametrize("count", [3, 1 << 19])
def test_outputs_stay_when_the_next_ones_are_computed(tmp_path: Path, count: int) -> None:
    check_outputs_stay(loaded(tmp_path, affine()), count)


@pytest.mark.parametrize("kind", [kind for kind in ARRAY_TYPES if kind != "bool"])
def test_integers_in_a_clients_memory_are_copied_before_the_engine_reads_them(
    tmp_path: Path, kind: str
) -> None:
    model = loaded(tmp_path, identity(kind))
    run = "run_with_ort_values" if kind == "bf16" else "run"
    found = computed_beside_change(model, model, "_session", run, kind)
    assert found == bytes([0 if kind in FLOATS else 1]) * 64


@pytest.mark.parametrize("kind", ["i32", "fp32", "bf16"])
def test_an_output_that_is_an_input_has_memory_of_its_own(tmp_path: Path, kind: str) -> None:
    model = loaded(tmp_path, graph([], [("x", kind, ["n"])], [("x", kind, ["n"])]))
    element = np.dtype(ARRAY_TYPES[kind]).itemsize
    for count in (3, 1 << 19):
        data = np.arange(element * count, dtype=np.uint8)
        for shared in (data.tobytes(), cast(bytes, data.data)):
            given = Tensor(shared, (count,), TYPES[kind])
            [(_, output)] = model.compute([("x", given)])
            assert output.data == data.tobytes()
            found = np.frombuffer(output.data, np.uint8)
            assert not np.may_share_memory(found, np.frombuffer(shared, np.uint8))


def test_after_an_error_of_its_device_no_other_one_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EPFail("the device is lost")

    model = loaded(tmp_path, identity("fp32"))
    assert isinstance(model, onnx_model.OnnxModel) and model._session is not None
    device = Mock(wraps=model._session._sess, run=fail)
    monkeypatch.setattr(model._session, "_sess", device)
    with pytest.raises(BackendError, match="the device is lost"):
        model.compute([("x0", Tensor(bytes(4), (1,), TYPES["fp32"]))])


def strings(*values: bytes, dimensions: tuple[int, ...] | None = None) -> Tensor:
    shape = (len(values),) if dimensions is None else dimensions
    return Tensor(pack_strings(values), shape, TYPES["string"])


def test_strings_pass_with_and_without_numbers_beside_them(tmp_path: Path) -> None:
    model = loaded(tmp_path, identity("string", "bool", "i64"))
    given = strings(b"", b"a\0b", "\u00e4\u20ac\U0001f600".encode(), b"x" * 100_000)
    truth, number = Tensor(b"\1", (1,), TYPES["bool"]), Tensor(bytes(16), (2,), TYPES["i64"])
    outputs = model.compute([("x0", given), ("x1", truth), ("x2", number)])
    assert outputs == [("y0", given), ("y1", truth), ("y2", number)]
    model = loaded(tmp_path, identity("string", shape=[]))
    assert model.compute([("x0", strings(b"one"))]) == [("y0", strings(b"one", dimensions=()))]
    model = loaded(tmp_path, identity("string", shape=["n", "m"]))
    for one in (strings(dimensions=(0, 3)), strings(b"a", b"b", dimensions=(1, 2))):
        assert model.compute([("x0", one)]) == [("y0", one)]


def test_strings_are_computed_from_numbers_and_numbers_from_strings(tmp_path: Path) -> None:
    cast = graph(
        [onnx.helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.STRING)],
        [("x", "i32", ["n"])],
        [("y", "string", ["n"])],
    )
    numbers = Tensor(struct.pack("2i", 7, -12), (2,), TYPES["i32"])
    assert loaded(tmp_path, cast).compute([("x", numbers)]) == [("y", strings(b"7", b"-12"))]
    back = graph(
        [onnx.helper.make_node("Cast", ["x"], ["y"], to=onnx.TensorProto.INT32)],
        [("x", "string", ["n"])],
        [("y", "i32", ["n"])],
    )
    assert loaded(tmp_path, back).compute([("x", strings(b"7", b"-12"))]) == [("y", numbers)]
    nodes = [
        onnx.helper.make_node("Cast", ["x"], ["z"], to=onnx.TensorProto.FLOAT),
        onnx.helper.make_node("Cast", ["z"], ["y"], to=onnx.TensorProto.STRING),
    ]
    halves = graph(nodes, [("x", "bf16", ["n"])], [("y", "string", ["n"]), ("z", "fp32", ["n"])])
    [(_, text), _] = loaded(tmp_path, halves).compute(
        [("x", Tensor(b"\x80\x3f\x00\xc0", (2,), TYPES["bf16"]))]
    )
    assert text == strings(b"1", b"-2")


def test_strings_are_utf8_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(tmp_path, identity("string"))
    with pytest.raises(InvalidArgument, match=r"'x0' .* got a string that is not UTF-8"):
        model.compute([("x0", strings(b"a", b"\xff"))])
    monkeypatch.setattr(graphs, "OUTPUT_BYTES_MAX", 12)
    model.compute([("x0", strings(b"12345678"))])
    with pytest.raises(TooLarge, match="13 bytes, more than 12"):
        model.compute([("x0", strings(b"123456789"))])
    monkeypatch.setattr(graphs, "STRINGS_MAX", 1)
    with pytest.raises(TooLarge, match="strings"):
        model.compute([("x0", strings(b"", b""))])


def test_scalars_pass(tmp_path: Path) -> None:
    model = loaded(tmp_path, identity("fp64", "bf16", shape=[]))
    number = Tensor(struct.pack("d", 1.5), (), TYPES["fp64"])
    small = Tensor(b"\1\2", (), TYPES["bf16"])
    outputs = model.compute([("x0", number), ("x1", Tensor(b"\1\2", (1,), TYPES["bf16"]))])
    assert outputs == [("y0", number), ("y1", small)]


def test_a_computation_can_be_cancelled_before_it_begins_and_others_are_not(tmp_path: Path) -> None:
    model = loaded(tmp_path, loop())
    one, two = (model.new_computation([("x", floats(1, 2)), times(3)]) for _ in range(2))
    one.cancel()
    with pytest.raises(Cancelled):
        one.run()
    assert two.run() == [("y", floats(1, 2))]


def test_lanes_compute_at_once_and_one_can_be_cancelled(tmp_path: Path) -> None:
    model = loaded(tmp_path, loop())
    model.add_lane()
    endless = model.new_computation([("x", floats(1)), times(1 << 62)])
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(endless.run, 0)
        other = model.new_computation([("x", floats(2)), times(3)])
        assert other.run(1) == [("y", floats(2))]
        assert not ended.done()
        endless.cancel()
        with pytest.raises(Cancelled):
            ended.result()
    assert [info.name for info, _ in other.inputs] == ["x", "times"]


def test_lanes_divide_the_threads() -> None:
    spec = ModelSpec(name="g", threads=4)
    assert [replace(spec, lanes=lanes).lane_threads for lanes in (1, 2, 4, 8)] == [4, 2, 1, 1]


def test_inputs_that_the_engine_refuses_are_invalid(tmp_path: Path) -> None:
    gather = graph(
        [onnx.helper.make_node("Gather", ["d", "i"], ["y"])],
        [("d", "fp32", ["n"]), ("i", "i64", ["k"])],
        [("y", "fp32", ["k"])],
    )
    model = loaded(tmp_path, gather)
    index = Tensor(struct.pack("q", 7), (1,), TYPES["i64"])
    with pytest.raises(InvalidArgument, match="out of data bounds"):
        model.compute([("d", floats(1, 2)), ("i", index)])


def test_a_failed_run_is_a_backend_error(tmp_path: Path) -> None:
    model = loaded(tmp_path, affine())
    one, two = (Tensor(bytes(8 * n), (n, 2), TYPES["fp32"]) for n in (2, 3))
    with pytest.raises(BackendError, match=r"computation failed: .*Add"):
        model.compute([("a", one), ("b", two)])


def test_outputs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output_bound(loaded(tmp_path, identity("u8")), monkeypatch)


@pytest.mark.parametrize("kind", ["complex64"])
def test_types_that_are_not_served_are_refused_at_the_load(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedOperation, match=f"'x1' of 'g' is of type {kind}"):
        loaded(tmp_path, identity("u8", kind))


def test_a_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.delitem(sys.modules, onnx_model.__name__)
    with pytest.raises(UnsupportedOperation, match="'onnx' cannot be used here") as caught:
        loaded(tmp_path, affine())
    assert "install" in caught.value.hint and "[onnx]" in caught.value.hint


def test_an_unknown_operator_is_a_failed_load(tmp_path: Path) -> None:
    unknown = graph(
        [onnx.helper.make_node("Nonsense", ["x"], ["y"])],
        [("x", "u8", ["n"])],
        [("y", "u8", ["n"])],
    )
    with pytest.raises(LoadFailed, match=r"ONNX Runtime does not load 'g': .*Nonsense"):
        loaded(tmp_path, unknown)


def test_a_load_is_cancelled(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(affine())
    check_cancelled_load("onnx", tmp_path / "g.onnx")


def test_memory_is_estimated_from_all_files(tmp_path: Path) -> None:
    model = onnx.load_from_string(affine())
    onnx.external_data_helper.convert_model_to_external_data(
        model, location="w.bin", size_threshold=0
    )
    onnx.save(model, tmp_path / "g.onnx")
    (tmp_path / "w.bin").write_bytes(bytes(1 << 20))
    spec = ModelSpec(name="g", backend="onnx", path=str(tmp_path / "g.onnx"))
    estimator = estimate_memory(spec)
    need = estimator.need(estimator.shape)
    assert 1.3 * (1 << 20) < need.weights < 1.4 * (1 << 20)
    assert need.total == need.weights + need.process
    estimator.close()
    with open(tmp_path / "g.onnx", "rb") as file:  # which says nothing about the other one
        estimator = estimate_memory(ModelSpec(name="g", backend="onnx", fd=file.fileno()))
        assert estimator.need(estimator.shape).weights < 1 << 20
        estimator.close()


def test_a_graph_of_one_thread_computes_in_its_caller(tmp_path: Path) -> None:
    found, size = loaded(tmp_path, square()), 512
    matrix = ("x", floats(*[1.0] * size**2, dimensions=(size, size)))
    assert found.computes_in_caller
    assert share_of_caller(found, [matrix]) > 0.8
    found.close()

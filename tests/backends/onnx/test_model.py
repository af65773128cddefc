"""Graphs in ONNX in this process: all types, cancelled runs, and graphs that are refused."""

from __future__ import annotations

import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec.structs import replace

from inferd.backends import (
    GraphModel,
    LanguageModel,
    ModelSpec,
    estimate_memory,
    graphs,
    load_model,
)
from inferd.backends.errors import (
    BackendError,
    Cancelled,
    InvalidArgument,
    LoadFailed,
    TooLarge,
    UnsupportedOperation,
)
from inferd.backends.onnx import model as onnx_model
from inferd.backends.tensors import ARRAY_TYPES, OTHER_TYPES, TENSOR_TYPES, NamedTensor, Tensor
from tests.onnx_graphs import affine, graph, identity, loop

TYPES = TENSOR_TYPES | OTHER_TYPES


def loaded(folder: Path, data: bytes, **spec: object) -> GraphModel:
    (folder / "g.onnx").write_bytes(data)
    return load_spec(ModelSpec(name="g", backend="onnx", path=str(folder / "g.onnx")))


def load_spec(spec: ModelSpec) -> GraphModel:
    model = load_model(spec, lambda _: True)
    assert isinstance(model, onnx_model.OnnxModel) and not isinstance(model, LanguageModel)
    return model


def floats(*values: float) -> Tensor:
    return Tensor(struct.pack(f"{len(values)}f", *values), (len(values),), TYPES["fp32"])


def times(count: int) -> NamedTensor:
    return "times", Tensor(struct.pack("q", count), (), TYPES["i64"])


def test_outputs_are_computed_from_inputs(tmp_path: Path) -> None:
    model = loaded(tmp_path, affine())
    a = Tensor(struct.pack("2f", 1, 2), (1, 2), TYPES["fp32"])
    [(name, y)] = model.compute([("a", a), ("b", a)])
    assert (name, y.dimensions, struct.unpack("2f", y.data)) == ("y", (1, 2), (3.0, 6.0))
    model.close()


@pytest.mark.parametrize("kind", TYPES)
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
    model = loaded(tmp_path, identity("u8"))
    monkeypatch.setattr(graphs, "OUTPUT_BYTES_MAX", 4)
    model.compute([("x0", Tensor(bytes(4), (4,)))])
    with pytest.raises(TooLarge, match="5 bytes, more than 4"):
        model.compute([("x0", Tensor(bytes(5), (5,)))])


@pytest.mark.parametrize("kind", ["string"])
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
    spec = ModelSpec(name="g", backend="onnx", path=str(tmp_path / "g.onnx"))
    with pytest.raises(Cancelled):
        load_model(spec, lambda _: False)


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

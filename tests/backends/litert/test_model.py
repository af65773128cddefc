"""Graphs in TensorFlow Lite in this process: all types, shapes, states, and refused graphs."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from inferd.backends import GraphModel, ModelSpec, estimate_memory, graphs
from inferd.backends.errors import (
    BackendError,
    InvalidArgument,
    LoadFailed,
    TooLarge,
    UnsupportedOperation,
)
from inferd.backends.litert import model as litert_model
from inferd.backends.tensors import ARRAY_TYPES, Tensor, pack_strings, unpack_strings
from tests.backends.graph_models import (
    TYPES,
    check_bools_of_a_client,
    check_cancelled_load,
    check_cancelling,
    check_output_bound,
    check_outputs_stay,
    check_shapes,
    check_strings_of_a_client,
    computed_beside_change,
    floats,
    load_graph,
    share_of_caller,
)
from tests.tflite_graphs import (
    Node,
    Signature,
    Subgraph,
    affine,
    gather,
    identity,
    model,
    sum_so_far,
)
from tests.tflite_graphs import Tensor as Declared

SERVED = [kind for kind in ARRAY_TYPES if kind != "bf16"]


def loaded(folder: Path, data: bytes) -> GraphModel:
    (folder / "g.tflite").write_bytes(data)
    spec = ModelSpec(name="g", backend="litert", path=str(folder / "g.tflite"))
    return load_graph(spec, litert_model.LiteRtModel)


def test_outputs_are_computed_in_each_shape(tmp_path: Path) -> None:
    found = loaded(tmp_path, affine())
    check_shapes(found)
    found.close()


@pytest.mark.parametrize("kind", SERVED)
def test_tensors_of_each_type_keep_their_bytes(tmp_path: Path, kind: str) -> None:
    found = loaded(tmp_path, identity(kind, shape=["n", "m"]))
    size = np.dtype(ARRAY_TYPES[kind]).itemsize
    data = {"bool": b"\1\0"}.get(kind) or bytes(range(1, 17))
    tensor = Tensor(data, (2, len(data) // size // 2), TYPES[kind])
    assert found.compute([("x0", tensor)]) == [("x0", tensor)]


@pytest.mark.parametrize("kind", ["i32", "fp32"])
def test_a_clients_memory_is_copied_before_the_engine_computes(tmp_path: Path, kind: str) -> None:
    found = loaded(tmp_path, identity(kind, shape=["n"]))
    assert isinstance(found, litert_model.LiteRtModel)
    interpreter = found._lanes[0]
    assert computed_beside_change(found, interpreter, "_interpreter", "invoke", kind) == b"\1" * 64


def test_bools_in_a_clients_memory_are_checked_as_they_are_computed(tmp_path: Path) -> None:
    check_bools_of_a_client(loaded(tmp_path, identity("bool", shape=["n"])))


def test_strings_in_a_clients_memory_are_read(tmp_path: Path) -> None:
    check_strings_of_a_client(loaded(tmp_path, identity("string", shape=["n"])))


@pytest.mark.parametrize("count", [3, 1 << 19])
def test_outputs_stay_when_the_next_ones_are_computed(tmp_path: Path, count: int) -> None:
    found = loaded(tmp_path, affine())
    check_outputs_stay(found, count)


def strings(*values: bytes, dimensions: tuple[int, ...] | None = None) -> Tensor:
    shape = (len(values),) if dimensions is None else dimensions
    return Tensor(pack_strings(values), shape, TYPES["string"])


def test_strings_are_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loaded(tmp_path, gather("string"))
    words = strings(b"", b"a\0b", b"\xff\xfe", b"x" * 1000)
    for places in ((3, 1), (2,), (0, 0, 1)):
        index = Tensor(struct.pack(f"{len(places)}i", *places), (len(places),), TYPES["i32"])
        picked = [unpack_strings(words.data)[place] for place in places]
        assert found.compute([("d", words), ("i", index)]) == [("y", strings(*picked))]
    found = loaded(tmp_path, identity("string", shape=[2, "n"]))
    given = strings(b"a", b"b", dimensions=(2, 1))
    assert found.compute([("x0", given)]) == [("x0", given)]
    monkeypatch.setattr(graphs, "STRINGS_MAX", 1)
    with pytest.raises(TooLarge, match="strings"):
        found.compute([("x0", given)])


def test_scalars_pass(tmp_path: Path) -> None:
    found = loaded(tmp_path, identity("fp64", "i64", shape=[]))
    number = Tensor(struct.pack("d", 1.5), (), TYPES["fp64"])
    count = Tensor(struct.pack("q", 7), (), TYPES["i64"])
    outputs = found.compute([("x0", number), ("x1", Tensor(count.data, (1,), TYPES["i64"]))])
    assert outputs == [("x0", number), ("x1", count)]


def test_dimensions_of_0_pass(tmp_path: Path) -> None:
    found = loaded(tmp_path, affine())
    empty = Tensor(b"", (0, 2), TYPES["fp32"])
    assert found.compute([("a", empty), ("b", empty)]) == [("y", empty)]
    one = floats(1, 2, dimensions=(1, 2))
    assert found.compute([("a", one), ("b", one)])[0][1].data == floats(3, 6).data


def test_inputs_have_the_names_of_the_signature_and_of_tensors(tmp_path: Path) -> None:
    signature = Signature({"first": "b", "second": "a"}, {"sum": "y"})
    found = loaded(tmp_path, affine(signatures=[signature]))
    two, ten = floats(1, 2, dimensions=(1, 2)), floats(10, 20, dimensions=(1, 2))
    expected = [("sum", floats(12, 24, dimensions=(1, 2)))]
    for names in (("second", "first"), ("a", "b"), ("0", "1"), ("a", "first")):
        assert found.compute([(names[0], two), (names[1], ten)]) == expected
    with pytest.raises(InvalidArgument, match="given twice"):
        found.compute([("second", two), ("a", two)])


def test_a_state_is_not_seen_by_the_next_computation(tmp_path: Path) -> None:
    found = loaded(tmp_path, sum_so_far())
    one = floats(1, dimensions=(1, 1))
    assert [found.compute([("x", one)]) for _ in range(3)] == [[("y", one)]] * 3


def test_a_computation_that_has_not_begun_can_be_cancelled(tmp_path: Path) -> None:
    check_cancelling(loaded(tmp_path, identity("u8")))


def test_a_failed_computation_is_an_error_and_the_next_one_works(tmp_path: Path) -> None:
    found = loaded(tmp_path, gather())
    numbers = floats(1, 2)
    bad, good = (Tensor(struct.pack("i", n), (1,), TYPES["i32"]) for n in (7, 1))
    for _ in range(2):
        with pytest.raises(BackendError, match=r"computation failed: .*GATHER"):
            found.compute([("d", numbers), ("i", bad)])
        assert found.compute([("d", numbers), ("i", good)]) == [("y", floats(2))]


def test_shapes_that_do_not_fit_each_other_are_an_error(tmp_path: Path) -> None:
    found = loaded(tmp_path, affine())
    one, two = (Tensor(bytes(8 * n), (n, 2), TYPES["fp32"]) for n in (2, 3))
    with pytest.raises(BackendError, match="computation failed"):
        found.compute([("a", one), ("b", two)])
    assert found.compute([("a", one), ("b", one)])[0][1].dimensions == (2, 2)


def test_outputs_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output_bound(loaded(tmp_path, identity("u8")), monkeypatch)


@pytest.mark.parametrize("kind", ["resource", "complex64"])
def test_types_that_are_not_served_are_refused_at_the_load(tmp_path: Path, kind: str) -> None:
    with pytest.raises(UnsupportedOperation, match=f"'x1' of 'g' is of type {kind}"):
        loaded(tmp_path, identity("u8", kind))


def test_a_missing_package_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    monkeypatch.delitem(sys.modules, litert_model.__name__)
    with pytest.raises(UnsupportedOperation, match="'litert' cannot be used here") as caught:
        loaded(tmp_path, affine())
    assert "install" in caught.value.hint and "[litert]" in caught.value.hint


def test_an_operator_without_its_parts_is_a_failed_load(tmp_path: Path) -> None:
    tensors = [Declared("x", "u8"), Declared("y", "u8")]
    unknown = model(Subgraph(tensors, [Node(120, ["x"], ["y"])], ["x"], ["y"]))
    with pytest.raises(LoadFailed, match="LiteRT does not load 'g'"):
        loaded(tmp_path, unknown)


def test_a_load_is_cancelled(tmp_path: Path) -> None:
    (tmp_path / "g.tflite").write_bytes(affine())
    check_cancelled_load("litert", tmp_path / "g.tflite")


def test_memory_is_estimated_from_weights_and_activations(tmp_path: Path) -> None:
    tensors = [Declared("x", "u8", (1 << 20,)), Declared("y", "u8", (1 << 20,))]
    (tmp_path / "g.tflite").write_bytes(model(Subgraph(tensors, [], ["x", "y"], ["x"])))
    spec = ModelSpec(name="g", backend="litert", path=str(tmp_path / "g.tflite"))
    estimator = estimate_memory(spec)
    need = estimator.need(estimator.shape)
    assert need.weights == 2 * (tmp_path / "g.tflite").stat().st_size
    assert need.compute == 2 << 20
    assert need.total == need.weights + need.compute + need.process
    estimator.close()


def test_a_graph_computes_in_its_caller(tmp_path: Path) -> None:
    found, rows = loaded(tmp_path, affine()), 1 << 18
    a = floats(*[1.0] * 2 * rows, dimensions=(rows, 2))
    assert found.computes_in_caller
    assert share_of_caller(found, [("a", a), ("b", a)]) > 0.8
    found.close()

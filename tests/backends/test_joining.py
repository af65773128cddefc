"""Joined computations: which inputs are joined, their outputs, and the probe on real graphs."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import onnx
import pytest
from onnx import TensorProto, helper

from inferd.backends import GraphModel, ModelSpec, load_model
from inferd.backends.errors import BackendError, Cancelled
from inferd.backends.joining import (
    JoinedComputation,
    cut_outputs,
    join_inputs,
    key_of,
    obstacle,
    rows_of,
)
from inferd.backends.joining_probe import probe_joining
from inferd.backends.tensors import ARRAY_TYPES, TENSOR_TYPES, NamedTensor, Tensor, TensorInfo
from tests.onnx_graphs import Port, affine, division, graph, identity, loop, loop_over_rows

FP32 = TENSOR_TYPES["fp32"]


def loaded(folder: Path, data: bytes) -> GraphModel:
    (folder / "g.onnx").write_bytes(data)
    spec = ModelSpec(name="g", backend="onnx", path=str(folder / "g.onnx"))
    return cast(GraphModel, load_model(spec, lambda _: True))


def floats(*values: float, rows: int) -> Tensor:
    data = struct.pack(f"{len(values)}f", *values)
    return Tensor(data, (rows, len(values) // rows), FP32)


def info(name: str, *shape: int | str) -> TensorInfo:
    return TensorInfo(name, "fp32", shape)


@pytest.mark.parametrize(
    ("inputs", "outputs", "reason"),
    [
        ([info("a", "n", 2), info("b", "n")], [info("y", "other", 3)], ""),
        ([info("a", "", 2), info("b", "")], [info("y", "")], ""),
        ([], [info("y", "n")], "it has no inputs"),
        ([info("a", "n")], [], "it has no outputs"),
        ([info("a", 1, 2)], [info("y", "n")], "the first dimension of the input 'a' .* is fixed"),
        ([info("a", "n")], [info("y", 4)], "the first dimension of the output 'y' .* is fixed"),
        ([info("a", "n")], [info("y")], "the output 'y' .* has no first dimension"),
        ([TensorInfo("a", "u8", None)], [info("y", "n")], "the input 'a' .* has no first"),
        ([info("a", "n"), info("b", "m")], [info("y", "n")], "different first dimensions: m, n"),
        ([info("a", "n", "n")], [info("y", "n")], "first dimension twice"),
    ],
)
def test_only_graphs_whose_first_dimensions_are_free_are_joined(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], reason: str
) -> None:
    found = obstacle(inputs, outputs)
    assert bool(found) == bool(reason)
    assert re.search(reason, found)


def test_inputs_are_appended_and_outputs_are_cut_at_the_same_rows() -> None:
    a, b = info("a", "n", 2), info("b", "n", 1)
    one = [(a, floats(1, 2, rows=1)), (b, floats(3, rows=1))]
    two = [(a, floats(4, 5, 6, 7, rows=2)), (b, floats(8, 9, rows=2))]
    joined = join_inputs([one, two])
    assert joined == [
        ("a", floats(1, 2, 4, 5, 6, 7, rows=3)),
        ("b", floats(3, 8, 9, rows=3)),
    ]
    assert cut_outputs(joined, [1, 2]) == [
        [(i.name, tensor) for i, tensor in part] for part in (one, two)
    ]
    assert (rows_of(one), rows_of(two)) == (1, 2)
    assert key_of(one) == key_of(two) == ((2,), (1,))


def test_inputs_with_different_rows_have_none() -> None:
    a, b = info("a", "n", 2), info("b", "n", 1)
    assert rows_of([(a, floats(1, 2, rows=1)), (b, floats(3, 4, rows=2))]) == 0
    assert rows_of([(a, Tensor(b"", (0, 2), FP32)), (b, Tensor(b"", (0, 1), FP32))]) == 0


def test_outputs_without_the_rows_of_all_parts_are_an_error() -> None:
    for dimensions in ((2, 1), ()):
        with pytest.raises(BackendError, match="joined computation has the shape"):
            cut_outputs([("y", Tensor(b"", dimensions, FP32))], [1, 2])


def affine_inputs(*rows: tuple[float, float]) -> list[NamedTensor]:
    numbers = [number for row in rows for number in row]
    tensor = floats(*numbers, rows=len(rows))
    return [("a", tensor), ("b", tensor)]


def test_a_joined_computation_has_the_outputs_of_each(tmp_path: Path) -> None:
    model = loaded(tmp_path, affine())
    parts = [model.new_computation(affine_inputs(*rows)) for rows in ([(1, 2)], [(3, 4), (5, 6)])]
    one, two = JoinedComputation(model, parts).run()
    assert one == [("y", floats(3, 6, rows=1))]
    assert two == [("y", floats(9, 12, 15, 18, rows=2))]


def test_a_joined_computation_is_cancelled_before_and_while_it_runs(tmp_path: Path) -> None:
    model = loaded(tmp_path, affine())
    joined = JoinedComputation(model, [model.new_computation(affine_inputs((1, 2)))])
    joined.cancel()
    with pytest.raises(Cancelled):
        joined.run()
    endless = loaded(tmp_path, loop_over_rows(1))
    times = Tensor(struct.pack("q", 1 << 62), (1,), TENSOR_TYPES["i64"])
    part = endless.new_computation([("x", floats(1, rows=1)), ("times", times)])
    joined = JoinedComputation(endless, [part])
    threading.Timer(0.05, joined.cancel).start()
    with pytest.raises(Cancelled):
        joined.run()


def weights(*shape: int) -> onnx.TensorProto:
    count = 1
    for size in shape:
        count *= size
    numbers = struct.pack(f"{count}f", *(((7 * n) % 11 - 5) / 8 for n in range(count)))
    return helper.make_tensor("w", TensorProto.FLOAT, shape, numbers, raw=True)


ROW: Sequence[Port] = [("x", "fp32", ["n", 8])]


def network(*nodes: onnx.NodeProto) -> bytes:
    return graph(nodes, ROW, [("y", "fp32", ["n", 4])], [weights(8, 4)])


def mean_of_rows() -> bytes:
    """Return a graph that subtracts the mean of all rows."""
    return graph(
        [
            helper.make_node("ReduceMean", ["x"], ["mean"], keepdims=1),
            helper.make_node("Sub", ["x", "mean"], ["y"]),
        ],
        ROW,
        [("y", "fp32", ["n", 8])],
    )


def quantized_at_run_time() -> bytes:
    """Return a graph whose 8-bit scale is that of all rows together."""
    return graph(
        [
            helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
        ROW,
        [("y", "fp32", ["n", 8])],
    )


def gather() -> bytes:
    """Return a graph that takes rows of `d` by their numbers: those of all callers."""
    return graph(
        [helper.make_node("Gather", ["d", "i"], ["y"])],
        [("d", "fp32", ["n", 4]), ("i", "i64", ["n"])],
        [("y", "fp32", ["n", 4])],
    )


def transposed() -> bytes:
    return graph(
        [helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])],
        [("x", "fp32", ["n", "m"])],
        [("y", "fp32", ["k", "l"])],
    )


def embedding() -> bytes:
    """Return a graph that looks up tokens, which must be below 3, and masks them."""
    return graph(
        [
            helper.make_node("Gather", ["w", "tokens"], ["found"]),
            helper.make_node("Cast", ["mask"], ["kept"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["kept", "last"], ["wide"]),
            helper.make_node("Mul", ["found", "wide"], ["y"]),
        ],
        [("tokens", "i64", ["n", "l"]), ("mask", "bool", ["n", "l"])],
        [("y", "fp32", ["n", "l", 4])],
        [weights(3, 4), helper.make_tensor("last", TensorProto.INT64, [1], [2])],
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (affine(), ""),
        (embedding(), ""),
        (network(helper.make_node("MatMul", ["x", "w"], ["y"])), ""),
        (identity(*ARRAY_TYPES, shape=["n", "m"]), ""),
        (identity("string", "u8"), "the input 'x0' .* has strings"),
        (mean_of_rows(), "joined inputs change the output 'y'"),
        (quantized_at_run_time(), "joined inputs change the output 'y'"),
        (gather(), "joined inputs change the output 'y'"),
        (transposed(), "joined inputs fail: .*'y' of a joined computation has the shape"),
        (division(), "cannot be probed: .*"),
        (loop(), "has no first dimension"),
        (loop_over_rows(1), ""),
        (
            network(
                helper.make_node("Sub", ["x", "x"], ["zero"]),
                helper.make_node("MatMul", ["zero", "w"], ["y"]),
            ),
            "do not depend on its inputs",
        ),
    ],
)
def test_a_graph_is_joined_if_two_inputs_have_the_same_results_alone_and_joined(
    tmp_path: Path, data: bytes, reason: str
) -> None:
    found = probe_joining(loaded(tmp_path, data), 60.0)
    assert bool(found) == bool(reason), found
    assert re.search(reason, found)


def test_a_probe_ends_in_its_time(tmp_path: Path) -> None:
    """The graph computes for as long as its inputs say, of which the probe's are 0 and 1."""
    model = loaded(tmp_path, endless())
    assert probe_joining(model, 0.1) == "its probe took more than 0.1 s"


def endless() -> bytes:
    model = onnx.load_from_string(loop())
    [node] = [node for node in model.graph.node if node.op_type == "Loop"]
    node.input[0] = "always"
    always = helper.make_tensor("always", TensorProto.INT64, [], [1 << 62])
    return graph(
        [node],
        [("x", "fp32", ["n", 1])],
        [("y", "fp32", ["n", 1])],
        [*model.graph.initializer, always],
    )

"""Small graphs in ONNX, made with the `onnx` package, and their files."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Port = tuple[str, str, Sequence[int | str] | None]
"""A name, a type and a shape."""
ELEMENTS = {
    "fp16": TensorProto.FLOAT16, "fp32": TensorProto.FLOAT, "fp64": TensorProto.DOUBLE,
    "bf16": TensorProto.BFLOAT16, "u8": TensorProto.UINT8, "i8": TensorProto.INT8,
    "u16": TensorProto.UINT16, "i16": TensorProto.INT16, "i32": TensorProto.INT32,
    "u32": TensorProto.UINT32, "i64": TensorProto.INT64, "u64": TensorProto.UINT64,
    "bool": TensorProto.BOOL, "string": TensorProto.STRING, "complex64": TensorProto.COMPLEX64,
}  # fmt: skip


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    weights: Sequence[onnx.TensorProto] = (),
) -> bytes:
    """Return the bytes of a model file."""
    made = helper.make_graph(
        list(nodes), "graph", list(map(_value, inputs)), list(map(_value, outputs)), list(weights)
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    return bytes(model.SerializeToString())


def _value(port: Port) -> onnx.ValueInfoProto:
    name, kind, shape = port
    return helper.make_tensor_value_info(name, ELEMENTS[kind], shape)


def identity(*kinds: str, shape: Sequence[int | str] | None = ("n",)) -> bytes:
    """Return a graph that copies inputs `x0`, `x1`, … of these types to `y0`, `y1`, …."""
    return graph(
        [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(len(kinds))],
        [(f"x{i}", kind, shape) for i, kind in enumerate(kinds)],
        [(f"y{i}", kind, shape) for i, kind in enumerate(kinds)],
    )


def affine(factor: float = 2) -> bytes:
    """Return a graph with the fp32 inputs `a` and `b` of [n, 2], and the output factor·a + b."""
    return graph(
        [helper.make_node("Mul", ["a", "two"], ["c"]), helper.make_node("Add", ["c", "b"], ["y"])],
        [("a", "fp32", ["n", 2]), ("b", "fp32", ["n", 2])],
        [("y", "fp32", ["n", 2])],
        [helper.make_tensor("two", TensorProto.FLOAT, [], struct.pack("f", factor), raw=True)],
    )


def square() -> bytes:
    """Return a graph that multiplies an fp32 matrix by itself."""
    return graph(
        [helper.make_node("MatMul", ["x", "x"], ["y"])],
        [("x", "fp32", ["n", "n"])],
        [("y", "fp32", ["n", "n"])],
    )


def truth() -> bytes:
    """Return a graph whose output is true where a u8 is not zero."""
    return graph(
        [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.BOOL)],
        [("x", "u8", ["n"])],
        [("y", "bool", ["n"])],
    )


def division() -> bytes:
    """Return a graph that divides int32; −2³¹ by −1 ends the process of ONNX Runtime."""
    return graph(
        [helper.make_node("Div", ["a", "b"], ["y"])],
        [("a", "i32", ["n"]), ("b", "i32", ["n"])],
        [("y", "i32", ["n"])],
    )


def loop() -> bytes:
    """Return a graph that copies `x` as often as `times` says."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["v"], ["v2"])],
        "body",
        [_value(("i", "i64", [])), _value(("c", "bool", [])), _value(("v", "fp32", ["n"]))],
        [_value(("c2", "bool", [])), _value(("v2", "fp32", ["n"]))],
    )
    true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
    return graph(
        [helper.make_node("Loop", ["times", "true", "x"], ["y"], body=body)],
        [("x", "fp32", ["n"]), ("times", "i64", [])],
        [("y", "fp32", ["n"])],
        [true],
    )


def loop_over_rows(width: int | str) -> bytes:
    """Return a graph that copies the rows of `x` as often as the greatest of `times` says."""
    model = onnx.load_from_string(loop())
    [node] = model.graph.node
    node.input[0] = "most"
    for value in (*node.attribute[0].g.input, *node.attribute[0].g.output):
        if value.name in ("v", "v2"):
            value.CopyFrom(_value((value.name, "fp32", ["n", width])))
    return graph(
        [helper.make_node("ReduceMax", ["times"], ["most"], keepdims=0), node],
        [("x", "fp32", ["n", width]), ("times", "i64", ["n"])],
        [("y", "fp32", ["n", width])],
        list(model.graph.initializer),
    )


def lookup() -> bytes:
    """Return a graph that looks up one of three numbers, 0, 10 and 20, by its index `i`."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [3], [0.0, 10.0, 20.0])
    return graph(
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [("i", "i64", ["n", 1])],
        [("y", "fp32", ["n", 1])],
        [table],
    )


def allocation() -> bytes:
    """Return a graph that fills as many numbers as `n` says, and returns their sum."""
    return graph(
        [
            helper.make_node("ConstantOfShape", ["n"], ["zeros"]),
            helper.make_node("ReduceSum", ["zeros"], ["y"], keepdims=0),
        ],
        [("n", "i64", [1])],
        [("y", "fp32", [])],
    )


def zeros() -> bytes:
    """Return a graph whose output has as many zeros as `n` says."""
    return graph(
        [helper.make_node("ConstantOfShape", ["n"], ["y"])],
        [("n", "i64", [1])],
        [("y", "fp32", ["m"])],
    )


def write_graphs(folder: Path, graphs: Mapping[str, bytes]) -> None:
    """Write model files by their names without the suffix."""
    for name, data in graphs.items():
        (folder / f"{name}.onnx").write_bytes(data)

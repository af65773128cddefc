"""Small graphs in TensorFlow Lite, made with the schema of `ai_edge_litert`, and their files."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flatbuffers
from ai_edge_litert import schema_py_generated as schema

ELEMENTS = {
    "fp32": 0, "fp16": 1, "i32": 2, "u8": 3, "i64": 4, "string": 5, "bool": 6, "i16": 7,
    "complex64": 8, "i8": 9, "fp64": 10, "u64": 12, "resource": 13, "u32": 15, "u16": 16,
}  # fmt: skip
Operator = schema.BuiltinOperator


@dataclass(frozen=True)
class Tensor:
    """A tensor of a subgraph; a size that is a text is free. *data* are weights."""

    name: str
    kind: str = "fp32"
    shape: Sequence[int | str] = ("n",)
    data: bytes = b""
    is_variable: bool = False
    has_rank: bool = True


@dataclass(frozen=True)
class Node:
    """An operator with its tensors by name, and the object of its options."""

    operator: int
    inputs: Sequence[str]
    outputs: Sequence[str]
    options: tuple[int, Any] | None = None


@dataclass(frozen=True)
class Subgraph:
    tensors: Sequence[Tensor]
    nodes: Sequence[Node]
    inputs: Sequence[str]
    outputs: Sequence[str]


@dataclass(frozen=True)
class Signature:
    """Names of the first subgraph's tensors, by the names that clients use."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    key: str = "serving_default"


@dataclass
class _Builder:
    model: Any = field(default_factory=schema.ModelT)
    codes: dict[int, int] = field(default_factory=dict)

    def subgraph(self, graph: Subgraph) -> Any:
        made = schema.SubGraphT()
        numbers = {one.name: number for number, one in enumerate(graph.tensors)}
        made.tensors = [self.tensor(one) for one in graph.tensors]
        made.inputs = [numbers[name] for name in graph.inputs]
        made.outputs = [numbers[name] for name in graph.outputs]
        made.operators = [self.node(one, numbers) for one in graph.nodes]
        return made

    def tensor(self, one: Tensor) -> Any:
        made = schema.TensorT()
        made.name, made.type = one.name.encode(), ELEMENTS[one.kind]
        made.isVariable, made.hasRank = one.is_variable, one.has_rank
        made.shape = [size if isinstance(size, int) else 1 for size in one.shape]
        if any(isinstance(size, str) for size in one.shape):
            made.shapeSignature = [size if isinstance(size, int) else -1 for size in one.shape]
        made.buffer = 0
        if one.data:
            buffer = schema.BufferT()
            buffer.data = list(one.data)
            made.buffer = len(self.model.buffers)
            self.model.buffers.append(buffer)
        return made

    def node(self, one: Node, numbers: Mapping[str, int]) -> Any:
        made = schema.OperatorT()
        made.opcodeIndex = self.codes.setdefault(one.operator, len(self.codes))
        made.inputs = [numbers.get(name, -1) for name in one.inputs]
        made.outputs = [numbers[name] for name in one.outputs]
        if one.options is not None:
            made.builtinOptionsType, made.builtinOptions = one.options
        return made


def model(*subgraphs: Subgraph, signatures: Sequence[Signature] = ()) -> bytes:
    """Return the bytes of a model file."""
    builder = _Builder()
    made = builder.model
    made.version, made.description = 3, b"graph"
    made.buffers = [schema.BufferT()]
    made.subgraphs = [builder.subgraph(one) for one in subgraphs]
    made.operatorCodes = []
    for number in builder.codes:
        code = schema.OperatorCodeT()
        code.builtinCode, code.deprecatedBuiltinCode = number, min(number, 127)
        code.version = 1
        made.operatorCodes.append(code)
    numbers = {one.name: number for number, one in enumerate(subgraphs[0].tensors)}
    made.signatureDefs = [_signature(one, numbers) for one in signatures]
    out = flatbuffers.Builder(1024)
    out.Finish(made.Pack(out), b"TFL3")
    return bytes(out.Output())


def _signature(one: Signature, numbers: Mapping[str, int]) -> Any:
    made = schema.SignatureDefT()
    made.signatureKey, made.subgraphIndex = one.key.encode(), 0
    made.inputs, made.outputs = (
        [_entry(name, numbers[tensor]) for name, tensor in sorted(names.items())]
        for names in (one.inputs, one.outputs)
    )
    return made


def _entry(name: str, number: int) -> Any:
    made = schema.TensorMapT()
    made.name, made.tensorIndex = name.encode(), number
    return made


def identity(*kinds: str, shape: Sequence[int | str] = ("n",)) -> bytes:
    """Return a graph whose outputs are its inputs `x0`, `x1`, …."""
    names = [f"x{i}" for i in range(len(kinds))]
    tensors = [Tensor(name, kind, shape) for name, kind in zip(names, kinds, strict=True)]
    return model(Subgraph(tensors, [], names, names))


def affine(*, signatures: Sequence[Signature] = ()) -> bytes:
    """Return a graph with the fp32 inputs `a` and `b` of [n, 2], and the output 2·a + b."""
    shape = ("n", 2)
    tensors = [
        Tensor("a", shape=shape),
        Tensor("b", shape=shape),
        Tensor("two", shape=(), data=struct.pack("f", 2)),
        Tensor("c", shape=shape),
        Tensor("y", shape=shape),
    ]
    nodes = [
        Node(
            Operator.MUL,
            ["a", "two"],
            ["c"],
            (schema.BuiltinOptions.MulOptions, schema.MulOptionsT()),
        ),
        Node(
            Operator.ADD,
            ["c", "b"],
            ["y"],
            (schema.BuiltinOptions.AddOptions, schema.AddOptionsT()),
        ),
    ]
    return model(Subgraph(tensors, nodes, ["a", "b"], ["y"]), signatures=signatures)


def modulo() -> bytes:
    """Return a graph with the remainders of int32; −2³¹ by −1 ends the process of LiteRT."""
    tensors = [Tensor(name, "i32") for name in ("a", "b", "y")]
    nodes = [Node(Operator.FLOOR_MOD, ["a", "b"], ["y"])]
    return model(Subgraph(tensors, nodes, ["a", "b"], ["y"]))


def gather(kind: str = "fp32") -> bytes:
    """Return a graph that picks the elements `i` of `d`."""
    shapes = {"d": (kind, ("n",)), "i": ("i32", ("k",)), "y": (kind, ("k",))}
    tensors = [Tensor(name, *rest) for name, rest in shapes.items()]
    options = schema.BuiltinOptions.GatherOptions, schema.GatherOptionsT()
    return model(
        Subgraph(tensors, [Node(Operator.GATHER, ["d", "i"], ["y"], options)], ["d", "i"], ["y"])
    )


def sum_so_far() -> bytes:
    """Return a graph that adds `x` to a state, and returns the sum."""
    one = struct.pack("f", 1)
    tensors = [
        Tensor("x", shape=(1, 1)),
        Tensor("w", shape=(1, 1), data=one),
        Tensor("r", shape=(1, 1), data=one),
        Tensor("bias", shape=(1,), data=bytes(4)),
        Tensor("state", shape=(1, 1), is_variable=True),
        Tensor("y", shape=(1, 1)),
    ]
    options = schema.BuiltinOptions.RNNOptions, schema.RNNOptionsT()
    names = ["x", "w", "r", "bias", "state"]
    return model(Subgraph(tensors, [Node(Operator.RNN, names, ["y"], options)], ["x"], ["y"]))


def loop() -> bytes:
    """Return a graph that counts to `times`."""
    scalar: dict[str, Any] = {"kind": "i32", "shape": ()}
    options = schema.WhileOptionsT()
    options.condSubgraphIndex, options.bodySubgraphIndex = 1, 2
    main = Subgraph(
        [
            Tensor("zero", data=bytes(4), **scalar),
            *(Tensor(name, **scalar) for name in ("times", "y", "same")),
        ],
        [
            Node(
                Operator.WHILE,
                ["zero", "times"],
                ["y", "same"],
                (schema.BuiltinOptions.WhileOptions, options),
            )
        ],
        ["times"],
        ["y"],
    )
    condition = Subgraph(
        [Tensor("i", **scalar), Tensor("times", **scalar), Tensor("c", "bool", ())],
        [Node(Operator.LESS, ["i", "times"], ["c"])],
        ["i", "times"],
        ["c"],
    )
    add = schema.BuiltinOptions.AddOptions, schema.AddOptionsT()
    body = Subgraph(
        [
            Tensor("i", **scalar),
            Tensor("times", **scalar),
            Tensor("one", data=struct.pack("i", 1), **scalar),
            Tensor("next", **scalar),
        ],
        [Node(Operator.ADD, ["i", "one"], ["next"], add)],
        ["i", "times"],
        ["next", "times"],
    )
    return model(main, condition, body)


def allocation() -> bytes:
    """Return a graph that fills as many numbers as `n` says, and returns their sum."""
    tensors = [
        Tensor("n", "i64", (1,)),
        Tensor("zero", shape=(), data=bytes(4)),
        Tensor("zeros", shape=("k",)),
        Tensor("axis", "i32", (1,), data=bytes(4)),
        Tensor("y", shape=()),
    ]
    nodes = [
        Node(Operator.FILL, ["n", "zero"], ["zeros"]),
        Node(
            Operator.SUM,
            ["zeros", "axis"],
            ["y"],
            (schema.BuiltinOptions.ReducerOptions, schema.ReducerOptionsT()),
        ),
    ]
    return model(Subgraph(tensors, nodes, ["n"], ["y"]))


def write_graphs(folder: Path, graphs: Mapping[str, bytes]) -> None:
    """Write model files by their names without the suffix."""
    for name, data in graphs.items():
        (folder / f"{name}.tflite").write_bytes(data)

"""Tensors of graphs that run in this process, and checks that hold for each engine."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pytest

from inferd.backends import GraphModel, LanguageModel, ModelSpec, graphs, load_model
from inferd.backends.errors import Cancelled, InvalidArgument, TooLarge
from inferd.backends.tensors import (
    ARRAY_TYPES,
    OTHER_TYPES,
    TENSOR_TYPES,
    NamedTensor,
    Tensor,
    pack_strings,
)

T = TypeVar("T")
TYPES = TENSOR_TYPES | OTHER_TYPES


def floats(*values: float, dimensions: tuple[int, ...] = ()) -> Tensor:
    """Return a tensor of fp32, by default with one dimension."""
    dimensions = dimensions or (len(values),)
    return Tensor(struct.pack(f"{len(values)}f", *values), dimensions, TYPES["fp32"])


def load_graph(spec: ModelSpec, kind: type[T]) -> T:
    """Load a graph of the engine whose models are of *kind*."""
    found = load_model(spec, lambda _: True)
    assert isinstance(found, kind) and not isinstance(found, LanguageModel)
    return found


def check_shapes(found: GraphModel) -> None:
    """Check that a graph of `affine` computes inputs of changing shapes."""
    for rows in (1, 3, 1, 2, 2):
        a = floats(*range(2 * rows), dimensions=(rows, 2))
        [(name, y)] = found.compute([("a", a), ("b", a)])
        expected = [3.0 * value for value in range(2 * rows)]
        assert (name, y.dimensions) == ("y", (rows, 2))
        assert [*struct.unpack(f"{2 * rows}f", y.data)] == expected


def check_outputs_stay(found: GraphModel, count: int) -> None:
    """Check that the outputs of a graph of `affine` do not change with the next computation."""
    outputs = []
    for number in (1, 2):
        a = floats(*[float(number)] * (2 * count), dimensions=(count, 2))
        outputs += found.compute([("a", a), ("b", a)])
    for number, (_, output) in zip((3, 6), outputs, strict=True):
        assert bytes(output.data) == struct.pack("f", number) * (2 * count)


def check_cancelling(found: GraphModel) -> None:
    """Check that a computation that has not begun can be cancelled, and others are not."""
    one, two = (found.new_computation([("0", Tensor(b"a", (1,)))]) for _ in range(2))
    one.cancel()
    with pytest.raises(Cancelled):
        one.run()
    [(_, output)] = two.run()
    assert output == Tensor(b"a", (1,))


def computed_beside_change(
    found: GraphModel, engine: Any, attribute: str, call: str, kind: str
) -> bytes:
    """Return the output of a graph that copies `x0`, [n] of a *kind* and all ones, from memory that
    its client fills with zeros before a *call* of the *attribute* of *engine* begins.
    """
    memory = bytearray(b"\1" * 64)
    original = getattr(engine, attribute)

    class Changing:
        def __getattr__(self, name: str) -> Any:
            if name == call:
                memory[:] = bytes(64)
            return getattr(original, name)

    setattr(engine, attribute, Changing())
    count = 64 // np.dtype(ARRAY_TYPES[kind]).itemsize
    shared = Tensor(cast(bytes, memoryview(memory)), (count,), TYPES[kind])
    [(_, output)] = found.compute([("0", shared)])
    assert not any(memory), "the engine was called"
    return bytes(output.data)


def check_bools_of_a_client(found: GraphModel) -> None:
    """Check that a graph that copies bools refuses others in memory that a client can change."""
    memory = bytearray(b"\0\1\1")
    for expected in (b"\0\1\1", b"\1\1\1"):
        memory[:] = expected
        tensor = Tensor(cast(bytes, memoryview(memory)), (3,), TYPES["bool"])
        computation = found.new_computation([("0", tensor)])
        [(_, output)] = computation.run()
        assert output.data == expected
    computation = found.new_computation([("0", tensor)])
    memory[1] = 2
    with pytest.raises(InvalidArgument, match="a byte other than 0 and 1"):
        computation.run()
    empty = Tensor(cast(bytes, memoryview(b"")), (0,), TYPES["bool"])
    assert found.compute([("0", empty)])[0][1].dimensions == (0,)


def check_strings_of_a_client(found: GraphModel) -> None:
    """Check that a graph that copies strings reads them in memory that a client can change."""
    strings = pack_strings([b"", "é".encode(), b"x" * 300])
    tensor = Tensor(cast(bytes, memoryview(strings)), (3,), TYPES["string"])
    [(_, output)] = found.compute([("0", tensor)])
    assert output.data == strings
    cut = Tensor(cast(bytes, memoryview(strings)[:-1]), (3,), TYPES["string"])
    with pytest.raises(InvalidArgument, match="damaged strings"):
        found.compute([("0", cut)])


def share_of_caller(found: GraphModel, inputs: Sequence[NamedTensor]) -> float:
    """Return the share of the CPU time of a computation that its caller's thread has."""
    found.compute(inputs)
    before = time.process_time(), time.thread_time()
    found.compute(inputs)
    after = time.process_time(), time.thread_time()
    return (after[1] - before[1]) / (after[0] - before[0])


def check_output_bound(found: GraphModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a graph that copies u8 refuses to return more bytes than allowed."""
    monkeypatch.setattr(graphs, "OUTPUT_BYTES_MAX", 4)
    found.compute([("x0", Tensor(bytes(4), (4,)))])
    with pytest.raises(TooLarge, match="5 bytes, more than 4"):
        found.compute([("x0", Tensor(bytes(5), (5,)))])


def check_cancelled_load(backend: str, file: Path) -> None:
    """Check that a load ends once it is cancelled."""
    with pytest.raises(Cancelled):
        load_model(ModelSpec(name="g", backend=backend, path=str(file)), lambda _: False)

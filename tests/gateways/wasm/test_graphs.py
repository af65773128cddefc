"""Graphs in ONNX for guests: core modules and components."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from wasmtime import Engine
from wasmtime.component import Linker

from inferd import Client
from inferd.backends.errors import UnsupportedOperation
from inferd.gateways.guests import graphs as guest_graphs
from inferd.gateways.wasm import component as component_module
from inferd.testing import RunningDaemon, running_daemon
from inferd.wasm import Preload, add_component_to_linker
from tests import tflite_graphs
from tests.gateways.wasm.driver import Driver
from tests.ir_graphs import write_ir
from tests.onnx_graphs import affine, identity, truth, write_graphs, zeros


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, {"affine": affine(), "bools": truth(), "zeros": zeros()})
    kinds = {"picture": "u8", "long": "i64", "scalar": "i64", "row": "fp32", "double": "fp64"}
    shapes: dict[str, Sequence[int | str]] = {"picture": [1, 2, 2, 3], "scalar": []}
    for name, kind in kinds.items():
        write_graphs(models, {name: identity(kind, shape=shapes.get(name, ["n"]))})
    write_graphs(models, {"two": identity("u8", "u8")})
    with running_daemon(models_dir=models) as running:
        yield running


def test_a_guest_computes_a_graph_by_name_also_on_the_target_of_a_preload(
    graphs: RunningDaemon,
) -> None:
    data = struct.pack("2f", 1, 2)
    preloads = {"any": Preload("affine"), "cpu": Preload("affine", "cpu")}
    with Client(graphs.socket) as client, Driver(client, preloads=preloads) as guest:
        for name in preloads:
            context = guest.context(name)
            assert guest.call("set_input", context, 0, guest.tensor(data, 1, (1, 2))) == 0
            assert guest.call("set_input", context, 1, guest.tensor(data, 1, (1, 2))) == 0
            assert guest.call("set_input", context, 1, guest.tensor(data, 4, (1, 2))) == 1
            assert guest.call("compute", context) == 0
            assert struct.unpack("2f", guest.output(context, size=8)) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("number", "config"), [(0, b""), (0, b"{}"), (1, b""), (4, b""), (5, b""), (4, b"{}")]
)
def test_a_guest_computes_a_graph_from_its_bytes(
    graphs: RunningDaemon, tmp_path: Path, number: int, config: bytes
) -> None:
    """OpenVINO's graphs have two builders, others one; WasmEdge's numbers of encodings."""
    builders = [tflite_graphs.affine()]
    if number == 0:
        write_ir(tmp_path, {"g": affine()})
        builders = [(tmp_path / f"g.{end}").read_bytes() for end in ("xml", "bin")]
    elif number == 1:
        builders = [affine()]
    builders += [config] if config else []
    with Client(graphs.socket) as client, Driver(client) as guest:
        records = b"".join(
            struct.pack("<II", guest.put(builder), len(builder)) for builder in builders
        )
        out = guest.put(bytes(4))
        arguments = guest.put(records), len(builders), number, 3, out
        assert guest.call("load", *arguments) == 0, guest.errors
        context = guest.init(guest.number_at(out))
        data = struct.pack("2f", 1, 2)
        for index in range(2):
            assert guest.call("set_input", context, index, guest.tensor(data, 1, (1, 2))) == 0
        assert guest.call("compute", context) == 0, guest.errors
        assert struct.unpack("2f", guest.output(context, size=8)) == (3.0, 6.0)


@pytest.mark.parametrize(
    ("name", "kind", "dimensions", "data"),
    [
        ("picture", 3, (1, 2, 2, 3), bytes(range(12))),
        ("picture", 2, (1, 2, 2, 3), bytes(range(12))),  # u8 in wasi-nn's first version
        ("long", 5, (1,), struct.pack("<q", 16_000)),
        ("long", 6, (1,), struct.pack("<q", 16_000)),  # i64 in the component model
        ("scalar", 5, (1,), struct.pack("<q", 16_000)),
        ("scalar", 5, (), struct.pack("<q", 16_000)),
        ("row", 1, (0,), b""),
        ("row", 1, (1,), struct.pack("f", 0.5)),
        ("double", 2, (1,), struct.pack("d", 0.5)),
        ("double", 2, (2,), struct.pack("2d", 0.5, 1)),
    ],
)
def test_inputs_of_any_type_and_shape_are_tensors(
    graphs: RunningDaemon, name: str, kind: int, dimensions: tuple[int, ...], data: bytes
) -> None:
    """Also those that would be texts of a language model."""
    with Client(graphs.socket) as client, Driver(client) as guest:
        context = guest.context(name)
        for _ in range(2):
            tensor = guest.tensor(data, kind, dimensions)
            assert guest.call("set_input", context, 0, tensor) == 0, guest.errors
            assert guest.call("compute", context) == 0, guest.errors
            assert guest.output(context) == data


def test_bytes_at_index_1_are_an_input_if_they_fit_and_else_parameters(
    graphs: RunningDaemon,
) -> None:
    with Client(graphs.socket) as client, Driver(client) as guest:
        context = guest.context("two")
        for index in range(2):
            assert guest.call("set_input", context, index, guest.tensor(b"{}", 3, (2,))) == 0
        assert guest.call("compute", context) == 0, guest.errors
        assert guest.output(context, 1) == b"{}"
        context = guest.context("affine")
        assert guest.set_input(context, {"temp": 0.5}) == 0
        for index in range(2):
            tensor = guest.tensor(struct.pack("2f", 1, 2), 1, (1, 2))
            assert guest.call("set_input", context, index, tensor) == 0
        assert guest.call("compute", context) == 0, guest.errors


@pytest.mark.parametrize("target", [0, 3])
def test_errors_of_graphs_have_numbers(graphs: RunningDaemon, target: int) -> None:
    data = struct.pack("2f", 1, 2)
    with Client(graphs.socket) as client, Driver(client, pages=8) as guest:

        def load(builders: list[bytes], encoding: int, target: int = target) -> int:
            records = b"".join(struct.pack("<II", guest.put(one), len(one)) for one in builders)
            out = guest.put(bytes(4))
            return guest.call("load", guest.put(records), len(builders), encoding, target, out)

        assert load([affine()[:20]], 1) == 1, "bytes that are not a graph"
        assert load([affine()], 4) == 1, "bytes of another encoding"
        assert load([b"PK\x03\x04" + bytes(100)], 3) == 2, "TorchScript"
        assert load([affine()], 1, 2) == 6, "a TPU"
        assert load([], 1) == 1
        context = guest.context("affine")
        assert guest.call("compute", context) == 1, "its inputs are missing"
        for index, kind, dimensions, size in (
            (2, 1, (1, 2), 8),
            (0, 4, (1, 2), 8),
            (0, 1, (2,), 8),
            (0, 1, (1, 3), 8),
            (0, 1, (1, 2), 7),
        ):
            tensor = guest.tensor(data[:size], kind, dimensions)
            assert guest.call("set_input", context, index, tensor) == 1
        assert guest.call("set_input", context + 1, 0, guest.tensor(data, 1, (1, 2))) == 1
        for index in range(2):
            tensor = guest.tensor(data, 1, (1, 2))
            guest.memory.write(guest.store, b"\x01\xde\xad\xbe", tensor + 8)
            assert guest.call("set_input", context, index, tensor) == 0, "the type is one byte"
        assert guest.call("compute", context) == 0, guest.errors
        buffer, written = guest.put(bytes(8)), guest.put(bytes(4))
        assert guest.call("get_output", context, 0, buffer, 7, written) == 7
        assert guest.read(buffer, 8) == bytes(8)
        assert guest.call("get_output", context, 2, buffer, 8, written) == 8
        assert struct.unpack("2f", guest.output(context, size=8)) == (3.0, 6.0)


ENCODINGS = {"openvino": 0, "onnx": 1, "tensorflowlite": 4}


def builders_of(encoding: str, folder: Path) -> list[bytes]:
    """Return the builders of `affine`."""
    if encoding == "tensorflowlite":
        return [tflite_graphs.affine()]
    if encoding == "onnx":
        return [affine()]
    write_ir(folder, {"g": affine()})
    return [(folder / f"g.{end}").read_bytes() for end in ("xml", "bin")]


@pytest.mark.parametrize("encoding", ["openvino", "onnx", "tensorflowlite"])
def test_errors_of_graphs_have_one_number_with_every_engine(
    graphs: RunningDaemon, tmp_path: Path, encoding: str
) -> None:
    builders = builders_of(encoding, tmp_path)
    damaged = [builders[0][: len(builders[0]) // 2], *builders[1:]]
    data = struct.pack("2f", 1, 2)
    with Client(graphs.socket) as client, Driver(client, pages=8) as guest:
        out = guest.put(bytes(4))

        def load(builders: list[bytes]) -> int:
            records = b"".join(struct.pack("<II", guest.put(one), len(one)) for one in builders)
            arguments = guest.put(records), len(builders), ENCODINGS[encoding], 0, out
            return guest.call("load", *arguments)

        def set_input(index: int, kind: int, dimensions: tuple[int, ...], size: int) -> int:
            tensor = guest.tensor(bytes(size), kind, dimensions)
            return guest.call("set_input", context, index, tensor)

        assert load(damaged) == 1
        assert load(builders) == 0, guest.errors
        context = guest.init(guest.number_at(out))
        assert guest.call("compute", context) == 1, "without inputs"
        assert set_input(2, 1, (1, 2), 8) == 1, "an index"
        assert set_input(0, 4, (1, 2), 8) == 1, "a type"
        assert set_input(0, 1, (1, 3), 12) == 1, "a size of a dimension"
        assert set_input(0, 1, (2,), 8) == 1, "the number of dimensions"
        assert set_input(0, 1, (1, 2), 7) == 1, "the number of bytes"
        assert guest.call("set_input", context, 0, guest.tensor(data, 1, (1, 2))) == 0
        assert guest.call("compute", context) == 1, "without the second one"
        assert guest.call("set_input", context, 1, guest.tensor(data, 1, (1, 2))) == 0
        assert guest.call("compute", context) == 0, guest.errors
        buffer, written = guest.put(bytes(8)), guest.put(bytes(4))
        assert guest.call("get_output", context, 2, buffer, 8, written) == 8
        assert guest.call("get_output", context, 0, buffer, 7, written) == 7
        assert struct.unpack("2f", guest.output(context, size=8)) == (3.0, 6.0)


LARGE_ROWS = (9 << 20) // 8
"""Rows whose tensor is larger than a frame takes."""


def large(value: float) -> bytes:
    return struct.pack("f", value) * 2 * LARGE_ROWS


def compute_large(guest: Driver, context: int, at: int, values: Sequence[int]) -> bytes:
    """Compute the two inputs at these addresses of the guest, and return the output."""
    shape, room = (LARGE_ROWS, 2), 8 * LARGE_ROWS
    dimensions = guest.put(struct.pack("<II", *shape))
    for index, value in enumerate(values):
        record = struct.pack("<IIIII", dimensions, 2, 1, value, room)
        assert guest.call("set_input", context, index, guest.put(record)) == 0, guest.errors
    assert guest.call("compute", context) == 0, guest.errors
    return read_large(guest, context, at)


def read_large(guest: Driver, context: int, at: int) -> bytes:
    written, room = guest.put(bytes(4)), 8 * LARGE_ROWS
    assert guest.call("get_output", context, 0, at, room - 1, written) == 7
    assert guest.call("get_output", context, 0, at, room, written) == 0, guest.errors
    assert guest.number_at(written) == room
    return guest.read(at, room)


def test_a_guest_computes_tensors_that_no_frame_takes(graphs: RunningDaemon) -> None:
    pages = 4 * 9 * 16 + 8
    with Client(graphs.socket) as client, Driver(client, pages=pages) as guest:
        context = guest.context("affine")
        values = [guest.put(large(value)) for value in (1, 10)]
        at = guest.put(bytes(8 * LARGE_ROWS))
        for first, second, expected in ((0, 1, 12), (1, 0, 21)):
            given = values[first], values[second]
            assert compute_large(guest, context, at, given) == large(expected)
        flat = guest.put(struct.pack("<I", 2 * LARGE_ROWS))
        wrong = struct.pack("<IIIII", flat, 1, 1, values[0], 8 * LARGE_ROWS)
        assert guest.call("set_input", context, 0, guest.put(wrong)) == 1, "another rank"
        # A small input follows, and both are computed anew.
        small = guest.tensor(struct.pack("2f", 1, 2), 1, (1, 2))
        for index in range(2):
            assert guest.call("set_input", context, index, small) == 0
        assert guest.call("compute", context) == 0, guest.errors
        assert struct.unpack("2f", guest.output(context)) == (3, 6)


def test_outputs_that_no_reply_takes_can_be_read_after_the_graph_was_unloaded(
    graphs: RunningDaemon,
) -> None:
    with Client(graphs.socket) as client, Driver(client, pages=9 * 16 + 8) as guest:
        rows = 8 * LARGE_ROWS // 4
        at = guest.put(bytes(8 * LARGE_ROWS))
        for is_read_before in (True, False):
            graph = guest.load("zeros")
            context = guest.init(graph)
            tensor = guest.tensor(struct.pack("<q", rows), 5, (1,))
            assert guest.call("set_input", context, 0, tensor) == 0, guest.errors
            assert guest.call("compute", context) == 0, guest.errors
            if is_read_before:
                assert read_large(guest, context, at) == bytes(4 * rows)
            assert guest.call("unload", graph) == 0, guest.errors
            assert read_large(guest, context, at) == bytes(4 * rows)


def test_the_bytes_of_a_contexts_inputs_are_bounded(
    graphs: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_graphs, "INPUTS_BYTES_MAX", 17 << 20)
    with Client(graphs.socket) as client, Driver(client, pages=9 * 16 + 8) as guest:
        context, value = guest.context("affine"), guest.put(large(1))
        dimensions = guest.put(struct.pack("<II", LARGE_ROWS, 2))
        record = guest.put(struct.pack("<IIIII", dimensions, 2, 1, value, 8 * LARGE_ROWS))
        assert guest.call("set_input", context, 0, record) == 0
        assert guest.call("set_input", context, 1, record) == 7
        assert guest.call("set_input", context, 0, record) == 0, "it replaces the other one"


def test_a_guest_sets_large_tensors_again_after_a_restart(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine()})
    with (
        running_daemon(models_dir=tmp_path) as daemon,
        Client(daemon.socket) as client,
        Driver(client, pages=3 * 9 * 16 + 8) as guest,
    ):
        context, value = guest.context("affine"), guest.put(large(1))
        at = guest.put(bytes(8 * LARGE_ROWS))
        assert compute_large(guest, context, at, (value, value)) == large(3)
        daemon.kill()
        daemon.start_again()
        assert guest.call("compute", context) == 0, guest.errors
        assert read_large(guest, context, at) == large(3)


def test_a_component_computes_a_graph_and_gets_no_types_that_it_cannot_have(
    graphs: RunningDaemon,
) -> None:
    with Client(graphs.socket) as client:
        running = add_component_to_linker(Linker(Engine()), client)
        host = component_module.ComponentHost(running, None)
        [compute] = host.functions(component_module.CONTEXT).values()

        def outputs(model: str, inputs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
            graph = running.load_by_name(model.encode())
            context = graph, running.init_execution_context(graph)
            held = host._held[component_module.TENSOR]
            return [(name, held[one.rep]) for name, one in compute(context, inputs)]

        tensor = ([1, 2], "FP32", struct.pack("2f", 1, 2))
        assert outputs("affine", [("a", tensor), ("1", tensor)]) == [
            ("y", ([1, 2], "FP32", struct.pack("2f", 3, 6)))
        ]
        tensor = ([LARGE_ROWS, 2], "FP32", large(1))
        assert outputs("affine", [("a", tensor), ("b", tensor)]) == [
            ("y", ([LARGE_ROWS, 2], "FP32", large(3)))
        ]
        with pytest.raises(UnsupportedOperation, match="no tensors of the type bool"):
            outputs("bools", [("x", ([2], "U8", b"ab"))])
        running.close()

"""Graphs in ONNX for guests: core modules and components."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wasmtime import Engine
from wasmtime.component import Linker

from inferd import Client
from inferd.backends.errors import UnsupportedOperation
from inferd.gateways.wasm import component as component_module
from inferd.testing import RunningDaemon, running_daemon
from inferd.wasm import Preload, add_component_to_linker
from tests import tflite_graphs
from tests.gateways.wasm.driver import Driver
from tests.ir_graphs import write_ir
from tests.onnx_graphs import affine, truth, write_graphs


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, {"affine": affine(), "bools": truth()})
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
        with pytest.raises(UnsupportedOperation, match="no tensors of the type bool"):
            outputs("bools", [("x", ([2], "U8", b"ab"))])
        running.close()

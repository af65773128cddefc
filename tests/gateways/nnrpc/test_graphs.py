"""Graphs of three engines for WasmEdge's client: types and errors by their numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests import tflite_graphs
from tests.gateways.nnrpc.driver import RpcError, WasmEdge
from tests.ir_graphs import write_ir
from tests.onnx_graphs import affine, identity, write_graphs

ONE_TWO = struct.pack("2f", 1, 2)
U8_OF_THE_FIRST_VERSION = 2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, {"onnx": affine(), "bytes": identity("u8")})
    write_graphs(models, {"picture": identity("u8", shape=[1, 2, 2, 3])})
    tflite_graphs.write_graphs(models, {"lite": tflite_graphs.affine()})
    write_ir(models, {"openvino": affine()})
    with running_daemon(models_dir=models) as running:
        yield running


@pytest.mark.parametrize("name", ["onnx", "lite", "openvino"])
def test_a_client_computes_a_graph_of_each_engine(guest: WasmEdge, name: str) -> None:
    context = guest.context(name)
    for index in range(2):
        assert guest.set_input(context, ONE_TWO, index, 1, (1, 2)) == 0
    assert guest.compute(context) == 0
    assert struct.unpack("2f", guest.output(context)) == (3, 6)
    for number, index, data, kind, dimensions in (
        (1, 2, ONE_TWO, 1, (1, 2)),  # the graph has fewer inputs
        (1, 0, ONE_TWO, 4, (1, 2)),  # another type
        (1, 0, ONE_TWO, 1, (2,)),  # another rank
        (1, 0, ONE_TWO, 1, (1, 3)),  # another size
        (1, 0, ONE_TWO[:-1], 1, (1, 2)),  # a byte is missing
    ):
        assert guest.set_input(context, data, index, kind, dimensions) == number
    assert guest.compute(context) == 0, "the refused inputs have changed nothing"
    with pytest.raises(RpcError) as caught:
        guest.call("GetOutput", resource_handle=context, index=0, output_max_size=7)
    assert (caught.value.number, caught.value.needed) == (7, 8)
    assert guest.number("GetOutput", resource_handle=context, index=2) == 8
    empty = guest.context(name)
    assert guest.compute(empty) == 1, "its inputs are missing"


def test_a_type_is_the_one_that_the_bytes_and_the_graph_have(guest: WasmEdge) -> None:
    context = guest.context("bytes")
    for data, kind in ((b"abc", 3), (b"de", U8_OF_THE_FIRST_VERSION), (b"", 3)):
        assert guest.set_input(context, data, 0, kind, (len(data),)) == 0
        assert guest.compute(context) == 0
        assert guest.output(context) == data


def test_a_picture_keeps_its_shape(guest: WasmEdge) -> None:
    context = guest.context("picture")
    for kind in (3, U8_OF_THE_FIRST_VERSION):
        assert guest.set_input(context, bytes(range(12)), 0, kind, (1, 2, 2, 3)) == 0
        assert guest.set_input(context, bytes(12), 0, kind, (12,)) == 1, "another rank"
        assert guest.compute(context) == 0
        assert guest.output(context) == bytes(range(12))

"""The inputs and outputs that a TensorFlow Lite file states, also of damaged files."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from inferd.backends.errors import LoadFailed
from inferd.backends.litert import header as litert_header
from inferd.backends.litert.header import LiteRtHeader, read_litert_header
from inferd.backends.tensors import TensorInfo
from tests.tflite_graphs import (
    Signature,
    Subgraph,
    Tensor,
    affine,
    identity,
    model,
    sum_so_far,
)


def header_of(folder: Path, data: bytes) -> LiteRtHeader:
    (folder / "g.tflite").write_bytes(data)
    return read_litert_header(folder / "g.tflite")


def test_inputs_and_outputs_have_types_and_shapes(tmp_path: Path) -> None:
    tensors = [
        Tensor("x0", "fp32", ("n", 3)),
        Tensor("x1", "i64", ()),
        Tensor("x2", "bool", (), has_rank=False),
        Tensor("x3", "string", (2,)),
    ]
    names = [one.name for one in tensors]
    header = header_of(tmp_path, model(Subgraph(tensors, [], names, names[::-1])))
    assert header.title == "graph"
    assert header.inputs == (
        TensorInfo("x0", "fp32", ("", 3)),
        TensorInfo("x1", "i64", ()),
        TensorInfo("x2", "bool", None),
        TensorInfo("x3", "string", (2,)),
    )
    assert header.outputs == header.inputs[::-1]
    assert header.tensor_names == {}


def test_a_signature_names_inputs_and_outputs_in_the_order_of_the_graph(tmp_path: Path) -> None:
    signature = Signature({"first": "b", "second": "a"}, {"sum": "y"}, key="any")
    header = header_of(tmp_path, affine(signatures=[signature]))
    assert [one.name for one in header.inputs] == ["second", "first"]
    assert [one.name for one in header.outputs] == ["sum"]
    assert header.tensor_names == {"a": "second", "b": "first"}


def test_of_several_signatures_the_default_one_names(tmp_path: Path) -> None:
    default = Signature({"p": "a", "q": "b"}, {"sum": "y"})
    other = Signature({"r": "a", "s": "b"}, {"sum": "y"}, key="other")
    for signatures, names in (([other, default], ["p", "q"]), ([other, other], ["a", "b"])):
        header = header_of(tmp_path, affine(signatures=signatures))
        assert [one.name for one in header.inputs] == names


def test_a_signature_without_all_names_and_one_name_twice_leave_other_names(tmp_path: Path) -> None:
    part = Signature({"p": "a"}, {"sum": "y"})
    assert [i.name for i in header_of(tmp_path, affine(signatures=[part])).inputs] == ["a", "b"]
    tensors = [Tensor("x", "u8"), Tensor("y", "u8")]
    twice = model(Subgraph(tensors, [], ["x", "x"], ["y", "x"]))
    header = header_of(tmp_path, twice)
    assert [one.name for one in header.inputs] == ["0", "1"]
    assert [one.name for one in header.outputs] == ["y", "x"]


def test_an_exchanged_name_means_the_name_of_the_signature(tmp_path: Path) -> None:
    exchanged = Signature({"a": "b", "b": "a"}, {"y": "y"})
    header = header_of(tmp_path, affine(signatures=[exchanged]))
    assert [one.name for one in header.inputs] == ["b", "a"] and header.tensor_names == {}


def test_activations_are_counted_while_they_are_alive(tmp_path: Path) -> None:
    header = header_of(tmp_path, affine())
    # a, b, c; then b, c, y: each of [1, 2] with four bytes.
    assert header.activation_bytes == 24


def test_a_state_is_noticed(tmp_path: Path) -> None:
    assert header_of(tmp_path, sum_so_far()).has_variables
    assert not header_of(tmp_path, affine()).has_variables


@pytest.mark.parametrize(
    "data", [b"", b"GGUF", bytes(8), b"\x20\0\0\0TFL3", b"\xff\xff\xff\xffTFL3"]
)
def test_a_file_without_a_graph_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(LoadFailed, match="is not a TensorFlow Lite file"):
        header_of(tmp_path, data)


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "missing", "/dev/zero"):
        with pytest.raises(LoadFailed, match="cannot read"):
            read_litert_header(path)


def test_random_damage_is_an_error_or_another_header(tmp_path: Path) -> None:
    rng = random.Random(1)
    data = affine(signatures=[Signature({"p": "a", "q": "b"}, {"sum": "y"})])
    refused = 0
    for number in range(1000):
        damaged = bytearray(data)
        for _ in range(1 + number % 3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        cut = rng.randrange(len(damaged) + 1) if number % 2 else len(damaged)
        try:
            header_of(tmp_path, bytes(damaged[:cut]))
        except LoadFailed as exc:
            refused += 1
            assert exc.message.isprintable()
    assert 0 < refused < 1000


def test_parts_that_are_referred_to_very_often_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(litert_header, "NUMBERS_MAX", 500)
    with pytest.raises(LoadFailed, match="more than 500 numbers"):
        header_of(tmp_path, identity(*["u8"] * 100))


def test_a_window_is_read_again_where_a_number_crosses_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = affine()
    expected = header_of(tmp_path, data)
    monkeypatch.setattr(litert_header, "_WINDOW_BYTES", 13)
    assert header_of(tmp_path, data) == expected
    assert struct.unpack("<I", data[:4])[0] < len(data)

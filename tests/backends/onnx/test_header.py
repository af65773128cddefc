"""The inputs and outputs that the header of an ONNX file states, also of damaged files."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from inferd.backends.errors import LoadFailed
from inferd.backends.onnx import header
from inferd.backends.onnx.header import (
    SIZE_MAX,
    check_one_file,
    declared_tensors,
    read_onnx_header,
)
from inferd.backends.tensors import TensorInfo
from tests.onnx_graphs import affine, graph, identity


def test_inputs_and_outputs_have_types_and_shapes(tmp_path: Path) -> None:
    file = tmp_path / "a.onnx"
    file.write_bytes(
        graph(
            [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(3)],
            [("x0", "fp32", ["n", 3, ""]), ("x1", "i64", []), ("x2", "bool", None)],
            [("y0", "fp32", ["n", 3, -1]), ("y1", "i64", []), ("y2", "bool", None)],
        )
    )
    found = read_onnx_header(file)
    assert found.title == "graph"
    assert found.inputs == (
        TensorInfo("x0", "fp32", ("n", 3, "")),
        TensorInfo("x1", "i64", ()),
        TensorInfo("x2", "bool", None),
    )
    assert found.outputs[0] == TensorInfo("y0", "fp32", ("n", 3, ""))
    assert found.external == frozenset()


def test_weights_that_an_older_file_lists_among_the_inputs_are_not_needed(tmp_path: Path) -> None:
    model = onnx.load_from_string(affine())
    weight = helper.make_tensor_value_info("two", TensorProto.FLOAT, [])
    model.graph.input.insert(0, weight)
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    assert [i.name for i in read_onnx_header(tmp_path / "a.onnx").inputs] == ["a", "b"]


def test_files_with_weights_are_listed(tmp_path: Path) -> None:
    model = onnx.load_from_string(affine())
    onnx.external_data_helper.convert_model_to_external_data(
        model, location="w.bin", size_threshold=0
    )
    onnx.save(model, tmp_path / "a.onnx")
    assert read_onnx_header(tmp_path / "a.onnx").external == {"w.bin"}


def elsewhere(location: str = "other.bin") -> onnx.TensorProto:
    """Return a tensor in another file."""
    made = helper.make_tensor("w", TensorProto.FLOAT, [1], bytes(4), raw=True)
    onnx.external_data_helper.set_external_data(made, location)
    made.ClearField("raw_data")
    return made


def in_weights(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(elsewhere())


def in_sparse_weights(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.add().values.CopyFrom(elsewhere())


def in_an_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["w"], value=elsewhere()))


def in_a_branch(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [elsewhere()])
    inner = helper.make_node("If", ["c"], ["z"], then_branch=branch, else_branch=branch)
    outer = helper.make_graph([inner], "outer", [], [])
    model.graph.node.append(helper.make_node("Loop", ["n", "c"], ["v"], body=outer))


def in_a_function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["w"], value=elsewhere())
    opset = [helper.make_opsetid("", 18)]
    model.functions.append(helper.make_function("own", "f", [], ["w"], [node], opset))


def in_training(model: onnx.ModelProto) -> None:
    model.training_info.add().algorithm.initializer.append(elsewhere())


@pytest.mark.parametrize(
    "add",
    [in_weights, in_sparse_weights, in_an_attribute, in_a_branch, in_a_function, in_training],
)
def test_another_file_is_found_at_any_place_of_a_tensor(
    tmp_path: Path, add: Callable[[onnx.ModelProto], None]
) -> None:
    model, file = onnx.load_from_string(affine()), tmp_path / "a.onnx"
    file.write_bytes(model.SerializeToString())
    check_one_file(str(file), "own")
    add(model)
    file.write_bytes(model.SerializeToString())
    with pytest.raises(LoadFailed, match=r"'own' has weights in another file, 'other\.bin'"):
        check_one_file(str(file), "own")


def test_a_search_for_other_files_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.onnx").write_bytes(affine())
    monkeypatch.setattr(header, "FIELDS_MAX", 10)
    with pytest.raises(LoadFailed, match="more than 10 fields"):
        check_one_file(str(tmp_path / "a.onnx"), "own")


def test_a_size_that_no_tensor_has_is_a_free_one(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(identity("u8", shape=[SIZE_MAX + 1]))
    assert read_onnx_header(tmp_path / "a.onnx").inputs[0].shape == ("",)


def test_other_values_than_tensors_are_named(tmp_path: Path) -> None:
    model = onnx.load_from_string(affine())
    sequence = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None)
    model.graph.output.append(sequence)
    (tmp_path / "a.onnx").write_bytes(model.SerializeToString())
    assert read_onnx_header(tmp_path / "a.onnx").outputs[1].type == "sequence"


@pytest.mark.parametrize("data", [b"", b"GGUF", b"\x08", b"\x3a\xff\xff\xff\xff\x0f", b"\x0b" * 9])
def test_a_file_without_a_graph_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.onnx").write_bytes(data)
    with pytest.raises(LoadFailed, match="is not an ONNX file"):
        read_onnx_header(tmp_path / "a.onnx")


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "missing", "/dev/zero"):
        with pytest.raises(LoadFailed, match="cannot read"):
            read_onnx_header(path)


def test_random_damage_is_an_error_or_another_header(tmp_path: Path) -> None:
    rng, data, file = random.Random(1), identity("u8", "fp32", "i64"), tmp_path / "a.onnx"
    refused = 0
    for number in range(2000):
        damaged = bytearray(data)
        for _ in range(1 + number % 3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        file.write_bytes(damaged[: rng.randrange(len(damaged) + 1)] if number % 2 else damaged)
        try:
            read_onnx_header(file)
        except LoadFailed as exc:
            refused += 1
            assert exc.message.isprintable()
    assert 0 < refused < 2000


def test_the_fields_and_texts_of_a_file_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.onnx"
    file.write_bytes(affine())
    for name, least, message in (
        ("FIELDS_MAX", 40, "more than 40 fields"),
        ("TEXT_BYTES_MAX", 60, "more than 60 bytes"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(header, name, least)
            with pytest.raises(LoadFailed, match=message):
                read_onnx_header(file)
    assert declared_tensors(file).inputs == read_onnx_header(file).inputs

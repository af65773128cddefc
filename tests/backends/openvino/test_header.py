"""The inputs and outputs that a graph's file states for OpenVINO, also of hostile files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from onnx import helper

from inferd.backends import ModelSpec, load_model
from inferd.backends.base import ModelInfo
from inferd.backends.errors import LoadFailed
from inferd.backends.openvino import header
from inferd.backends.openvino.header import declared_tensors, read_xml
from inferd.backends.openvino.model import engine_core
from inferd.backends.tensors import DeclaredTensors, TensorInfo
from tests.ir_graphs import bounded, save, strings, sum_so_far, write_ir
from tests.onnx_graphs import affine, graph, identity, loop, write_graphs

HEAD = '<?xml version="1.0"?>\n'


def by_the_engine(file: Path) -> ModelInfo:
    spec = ModelSpec(name="g", backend="openvino", path=str(file), threads=1)
    model = load_model(spec, lambda _: True)
    info = model.info
    model.close()
    return info


def check_like_the_engine(file: Path) -> DeclaredTensors:
    """Check that a file's header states all that the engine knows once it has loaded the graph. A
    file does not state the ranges of outputs, nor that an output is a scalar.
    """
    found, expected = declared_tensors(file), by_the_engine(file)
    assert found is not None and found.inputs == expected.inputs
    assert [(one.name, one.type) for one in found.outputs] == [
        (one.name, one.type) for one in expected.outputs
    ]
    for one, other in zip(found.outputs, expected.outputs, strict=True):
        assert one.shape is not None or not other.shape
        for size, exact in zip(one.shape or (), other.shape or (), strict=True):
            assert size == exact or (size == "" and isinstance(exact, str))
    return found


def many_types() -> bytes:
    kinds = ("fp16", "fp32", "fp64", "bf16", "bool", "u8", "i8", "u16", "i16", "u32", "i32", "i64")
    return identity(*kinds, shape=["n", 3, 1])


GRAPHS = {
    "affine": affine(),
    "types": many_types(),
    "scalars": identity("fp32", "i64", shape=[]),
    "loop": loop(),
    "copy": graph(
        [helper.make_node("Identity", ["x"], ["a_long_name"])],
        [("x", "fp32", ["n"])],
        [("a_long_name", "fp32", ["n"])],
    ),
    "twice": graph(
        [helper.make_node("Relu", ["a"], ["zz"]), helper.make_node("Identity", ["zz"], ["y"])],
        [("b", "fp32", [2]), ("a", "fp32", ["n"])],
        [("y", "fp32", ["n"]), ("zz", "fp32", ["n"])],
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_xml_states_the_ports_that_the_engine_finds(tmp_path: Path, name: str) -> None:
    write_ir(tmp_path, {"g": GRAPHS[name]})
    check_like_the_engine(tmp_path / "g.xml")


@pytest.mark.parametrize("name", sorted(set(GRAPHS) - {"loop"}))
def test_onnx_states_the_names_that_the_engine_has(tmp_path: Path, name: str) -> None:
    write_graphs(tmp_path, {"g": GRAPHS[name]})
    found, expected = declared_tensors(tmp_path / "g.onnx"), by_the_engine(tmp_path / "g.onnx")
    assert found is not None
    for ports, known in ((found.inputs, expected.inputs), (found.outputs, expected.outputs)):
        assert [(one.name, one.type) for one in ports] == [(one.name, one.type) for one in known]


def test_ranges_states_and_other_names(tmp_path: Path) -> None:
    save(bounded(), tmp_path / "g.xml")
    found = check_like_the_engine(tmp_path / "g.xml")
    assert found.inputs == (TensorInfo("x", "fp32", ("1..4", 2)),)
    save(sum_so_far(), tmp_path / "s.xml")
    assert [one.name for one in check_like_the_engine(tmp_path / "s.xml").outputs] == ["y"]
    save(strings(), tmp_path / "t.xml")
    declared = declared_tensors(tmp_path / "t.xml")
    assert declared is not None and declared.inputs == (TensorInfo("x", "string", ("",)),)


def test_a_file_without_names_of_outputs_has_those_of_the_operators_ports(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    text = (tmp_path / "g.xml").read_text()
    assert 'output_names="y"' in text
    (tmp_path / "g.xml").write_text(text.replace(' output_names="y"', ""))
    assert [one.name for one in check_like_the_engine(tmp_path / "g.xml").outputs] == ["y"]


def test_names_with_commas_are_one_name(tmp_path: Path) -> None:
    model = engine_core().read_model(affine())
    model.inputs[0].set_names({"a,b", "a, longer"})
    save(model, tmp_path / "g.xml")
    assert check_like_the_engine(tmp_path / "g.xml").inputs[0].name == "a,b"


def test_other_files_have_known_ports_once_they_are_loaded(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    text = (tmp_path / "g.xml").read_text()
    (tmp_path / "g.xml").write_text(text.replace('version="11"', 'version="10"', 1))
    assert declared_tensors(tmp_path / "g.xml") is None
    assert declared_tensors(tmp_path / "saved_model.pb") is None


def nested(depth: int) -> str:
    return f"{'<a>' * depth}{'</a>' * depth}"


BOMB = "<!DOCTYPE net [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;&a;&a;&a;&a;'>]>"
FILE = "<!DOCTYPE net [<!ENTITY a SYSTEM 'file:///etc/passwd'>]>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no element found"),
        ("net", "syntax error"),
        ("<other/>", "its first element is 'other'"),
        (f"{HEAD}{BOMB}<net name='&b;'/>", "it has a document type"),
        (f"{HEAD}{FILE}<net version='11'>&a;</net>", "it has a document type"),
        ("<!DOCTYPE net SYSTEM 'http://localhost/a.dtd'><net/>", "it has a document type"),
        ("<net version='11'>&a;</net>", "undefined entity"),
        (f"<net version='11'>{nested(300)}</net>", "256 elements within each other"),
        ("<net version='11'><layers><layer>", "no element found"),
        ("<net a='\ud800'/>", "not well-formed|invalid"),
    ],
)
def test_hostile_xml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "g.xml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(LoadFailed, match=message) as caught:
        read_xml(tmp_path / "g.xml")
    assert "is not an OpenVINO file" in caught.value.message and caught.value.hint


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "missing", "/dev/zero"):
        with pytest.raises(LoadFailed, match="cannot read"):
            read_xml(path)


def test_files_operators_and_names_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ir(tmp_path, {"g": identity("u8", "u8")})
    for name, least, message in (
        ("FILE_BYTES_MAX", 100, "more than 100 bytes"),
        ("LAYERS_MAX", 2, "more than 2 operators"),
        ("PORTS_MAX", 1, "more than 1 inputs or outputs"),
        ("NAME_CHARACTERS_MAX", 1, "more than 1 characters"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(header, name, least)
            with pytest.raises(LoadFailed, match=message):
                read_xml(tmp_path / "g.xml")
    assert read_xml(tmp_path / "g.xml") is not None


def test_random_damage_is_an_error_or_another_header(tmp_path: Path) -> None:
    write_ir(tmp_path, {"g": affine()})
    rng, data, refused = random.Random(1), (tmp_path / "g.xml").read_bytes(), 0
    for number in range(1000):
        damaged = bytearray(data)
        for _ in range(1 + number % 5):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "g.xml").write_bytes(
            damaged[: rng.randrange(len(damaged) + 1)] if number % 3 == 0 else damaged
        )
        try:
            read_xml(tmp_path / "g.xml")
        except LoadFailed as exc:
            refused += 1
            assert exc.message.isprintable()
    assert 0 < refused < 1000

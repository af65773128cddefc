"""`inferd run` and `inferd show` of graphs: files and numbers, values, files, mistakes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inferd import Client, TooLarge
from inferd.cli.inference.array_files import array_file, file_names, read_array
from inferd.cli.inference.graph_command import values_text
from inferd.ipc.client import Tensor
from inferd.ipc.client.arrays import ARRAY_NAMES, array_of
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.echo import echo_model
from tests.onnx_graphs import affine, graph, identity, write_graphs


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    (models / "broken.onnx").write_bytes(b"\x08\x0a" + bytes(100))
    graphs = {
        "affine": affine(),
        "fresh": identity("i32", "bf16", shape=["n", 3]),
        "scalar": identity("fp64", "bool", shape=[]),
        "wide": identity("fp32", shape=["n", "m"]),
        "texts": identity("string", shape=["n"]),
    }
    write_graphs(models, graphs)
    with running_daemon(echo_model("text"), models_dir=models) as running:
        yield running


def run(daemon: RunningDaemon, *arguments: str) -> str:
    result = inferd("run", *arguments, socket=daemon.socket)
    assert result.exit_code == 0, result.stderr
    return str(result.stdout)


def refusal(daemon: RunningDaemon, *arguments: str) -> str:
    result = inferd("run", *arguments, socket=daemon.socket)
    assert result.exit_code != 0 and "Traceback" not in result.stderr
    assert "internal error" not in result.stderr
    return str(result.stderr)


def test_show_prints_inputs_and_outputs_before_the_first_load(daemon: RunningDaemon) -> None:
    text = inferd("show", "fresh", socket=daemon.socket).stdout
    assert "state    not loaded\n  device   " in text
    assert "Inputs\n  x0   i32 [n, 3]\n  x1   bf16 [n, 3]\n\nOutputs\n  y0   i32 [n, 3]\n" in text
    shown = document(inferd("show", "fresh", "--json", socket=daemon.socket))
    assert shown["info"] is None
    assert shown["inputs"][0] == {"name": "x0", "type": "i32", "shape": ["n", 3]}
    assert [one["name"] for one in shown["outputs"]] == ["y0", "y1"]
    text = inferd("show", "text", socket=daemon.socket).stdout
    assert "Inputs" not in text


def test_a_load_prints_no_sessions_of_texts(daemon: RunningDaemon) -> None:
    assert inferd("load", "affine", socket=daemon.socket).stdout == "affine is loaded\n"


def test_a_damaged_file_is_named_as_the_problem(daemon: RunningDaemon) -> None:
    text = inferd("show", "broken", socket=daemon.socket).stdout
    assert "is not an ONNX file" in text and "Inputs" not in text


def test_inputs_come_from_files_and_numbers(daemon: RunningDaemon, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[1, 2], [3, 4]], np.float64))
    inputs = ("--input", f"a={tmp_path / 'a.npy'}", "--input", "b=[[10, 20], [0.5, 0]]")
    lines = run(daemon, "affine", *inputs).splitlines()
    assert [re.split(" {3,}", line) for line in lines] == [
        ["OUTPUT", "TYPE", "SHAPE", "VALUES"],
        ["y", "fp32", "[2, 2]", "12 24 6.5 8"],
    ]
    found = document(inferd("run", "affine", *inputs, "--json", socket=daemon.socket))
    [output] = found["outputs"]
    assert (output["name"], output["type"], output["shape"]) == ("y", "fp32", [2, 2])
    assert output["data"] == [[12.0, 24.0], [6.5, 8.0]]


def test_the_users_own_graph_is_computed(daemon: RunningDaemon, tmp_path: Path) -> None:
    write_graphs(tmp_path, {"mine": identity("u8", shape=["n"])})
    found = run(daemon, str(tmp_path / "mine.onnx"), "--input", "x0=[7, 8]")
    assert found.endswith("7 8\n")


def test_a_damaged_file_of_ones_own_is_named(daemon: RunningDaemon, tmp_path: Path) -> None:
    for name in ("mine.onnx", "mine.tflite", "mine.xml"):
        (tmp_path / name).write_bytes(b"\x93damaged" * 100)
        text = refusal(daemon, str(tmp_path / name), "--input", "x=1")
        assert name in text and "GGUF" not in text


def test_scalars_and_truth_values(daemon: RunningDaemon) -> None:
    found = document(
        inferd(
            *("run", "scalar", "--input", "x0=2.5", "--input", "x1=true", "--json"),
            socket=daemon.socket,
        )
    )
    assert [output["data"] for output in found["outputs"]] == [2.5, True]


def test_strings_come_from_json_and_files(daemon: RunningDaemon, tmp_path: Path) -> None:
    found = run(daemon, "texts", "--input", 'x0=["a", "\u00e4\\u001b[1m"]')
    assert found.endswith("""'a' '\u00e4\\x1b[1m'\n""")
    np.save(tmp_path / "u.npy", np.array(["one", "\u00e4\u20ac"]))
    np.save(tmp_path / "big.npy", np.array(["one", "\u00e4\u20ac"], ">U3"))
    np.save(tmp_path / "s.npy", np.array([b"one", "\u00e4\u20ac".encode()]))
    for name in ("u", "big", "s"):
        arguments = ("texts", "--input", f"x0={tmp_path / f'{name}.npy'}", "--json")
        [output] = document(inferd("run", *arguments, socket=daemon.socket))["outputs"]
        assert (output["type"], output["data"]) == ("string", ["one", "\u00e4\u20ac"])
    given = f"x0={tmp_path / 'u.npy'}"
    run(daemon, "texts", "--input", given, "--output", str(tmp_path / "out"))
    written = np.load(tmp_path / "out" / "y0.npy")
    assert written.dtype == np.dtype("<U3") and written.tolist() == ["one", "\u00e4\u20ac"]
    many = json.dumps([f"text {number}" for number in range(20)])
    assert run(daemon, "texts", "--input", f"x0={many}").endswith("'text 3' \u2026; 20 strings\n")


def test_files_of_strings_are_bounded(tmp_path: Path) -> None:
    header = "{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000,), }\n"
    data = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header.encode()
    (tmp_path / "empty.npy").write_bytes(data)
    with pytest.raises(TooLarge, match="more than 65536 strings"):
        read_array(tmp_path / "empty.npy")
    strings = [b"", b"x" * (8 << 20)] * 10
    packed = b"".join(struct.pack("<I", len(one)) + one for one in strings)
    with pytest.raises(TooLarge, match="20 strings of up to 8388608 characters"):
        array_file(Tensor(data=packed, dimensions=[20], type="string"))


def test_large_arrays_pass(daemon: RunningDaemon, tmp_path: Path) -> None:
    write_graphs(tmp_path, {"large": identity("fp32", shape=["n"])})
    array = np.arange(3 << 20, dtype=np.float32)
    np.save(tmp_path / "x.npy", array)
    graph, given = str(tmp_path / "large.onnx"), f"x0={tmp_path / 'x.npy'}"
    run(daemon, graph, "--input", given, "--output", str(tmp_path / "out.npz"))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["y0"], array)


def test_many_values_are_summarized(daemon: RunningDaemon, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(3, 4))
    found = run(daemon, "wide", "--input", f"x0={tmp_path / 'x.npy'}")
    assert found.endswith("0 1 2 3 …; min 0, max 11 at [2, 3], mean 5.5\n")


@pytest.mark.parametrize("target", ["out", "out.npz"])
def test_outputs_are_written_as_numpy_reads_them(
    daemon: RunningDaemon, tmp_path: Path, target: str
) -> None:
    inputs = ("--input", "x0=[[1, 2, 3]]", "--input", "x1=[[0.5, 1, -2]]")
    text = run(daemon, "fresh", *inputs, "--output", str(tmp_path / target))
    if target == "out":
        arrays = {name: np.load(tmp_path / target / f"{name}.npy") for name in ("y0", "y1")}
        assert str(tmp_path / "out" / "y0.npy") in text
    else:
        arrays = dict(np.load(tmp_path / target))
        assert f"{tmp_path / target}:y1" in text
    assert arrays["y0"].dtype == np.int32 and arrays["y0"].tolist() == [[1, 2, 3]]
    assert arrays["y1"].dtype == np.float32 and arrays["y1"].tolist() == [[0.5, 1, -2]]


def test_mistakes_are_sentences_with_hints(daemon: RunningDaemon, tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("text")
    np.save(tmp_path / "words.npy", np.array(["a"]))
    np.save(tmp_path / "dates.npy", np.array(["2026-01-01"], "M8[D]"))
    np.save(tmp_path / "f.npy", np.array([[0.5, 1]]))
    good = ("--input", "a=[[1, 2]]", "--input", "b=[[1, 2]]")
    named = "its inputs are 'a' (fp32 [n, 2]), 'b' (fp32 [n, 2])"
    for arguments, *texts in (
        (("affine", "--input", "c=[1]"), "'affine' has no input 'c'", named),
        (("affine", "--input", "a=[[1, 2]]"), "'b' (fp32 [n, 2]) is missing"),
        (("affine", "--input", "a=[1]", "--input", "b=[[1, 2]]"), "got the shape [1]"),
        (("affine", "--input", "a=[[1], 2]"), "lists of different lengths"),
        (("affine", "--input", 'a=["x"]'), "got the value 'x'", "send numbers of fp32"),
        (("fresh", "--input", "x0=[[1.5, 2, 3]]"), "got the value 1.5", "send numbers of i32"),
        (("fresh", "--input", "x0=[[3000000000, 2, 3]]"), "values that i32 does not have"),
        (("fresh", "--input", f"x0={tmp_path / 'f.npy'}"), "got an array of fp64", "as int32"),
        (("affine", "--input", "a=none.npy"), "none.npy cannot be read: No such file"),
        (("affine", "--input", "a=hello"), "neither a file nor numbers or strings in JSON"),
        (("affine", "--input", f"a={tmp_path / 'text.npy'}"), "is not a .npy file", "NumPy's save"),
        (("affine", "--input", f"a={tmp_path / 'words.npy'}"), "got an array of string"),
        (("affine", "--input", f"a={tmp_path / 'dates.npy'}"), "has elements of '<M8[D]'"),
        (("texts", "--input", "x0=[1]"), "got the value 1", "send strings"),
        (("affine", "hello"), "'affine' is a graph, which takes no text", named),
        (("affine", "hello", *good), "PROMPT is for language models"),
        (("affine", "--temp", "0", *good), "--temp is for language models"),
        (("affine", "--input", "a"), "is not of the form NAME=FILE.npy"),
        (("affine", "--input", "a=1", "--input", "a=2"), "--input a is given twice"),
        (("text", "--input", "a=none.npy"), "cannot be read"),
        (("missing", *good), "missing"),
        (("affine", *good, "--output", "/dev/null/x"), "/dev/null/x cannot be written"),
    ):
        found = refusal(daemon, *arguments)
        for text in texts:
            assert text in found.replace("\n", " "), (arguments, found)


def test_a_language_model_takes_no_inputs(tmp_path: Path) -> None:
    from tests.tiny_gguf import write_tiny

    write_tiny("llama", tmp_path)
    with running_daemon(models_dir=tmp_path) as running:
        found = refusal(running, "tiny-llama", "--input", "a=[1]")
        with Client(running.socket) as client:
            assert client.show("tiny-llama")["state"] == "cold", "it is not loaded for that"
    assert "'tiny-llama' is a language model, which computes no tensors" in found


@pytest.mark.parametrize("kind", [kind for kind in ARRAY_NAMES if kind != "bf16"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3,), (2, 3)])
def test_files_of_arrays_are_those_of_numpy(
    tmp_path: Path, kind: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(ARRAY_NAMES[kind])
    for name, given in (("little", array), ("big", array.astype(array.dtype.newbyteorder(">")))):
        np.save(tmp_path / f"{name}.npy", given)
        found = read_array(tmp_path / f"{name}.npy")
        assert (found.type, found.dimensions) == (kind, list(shape))
        assert np.array_equal(array_of(found), array)
        (tmp_path / "own.npy").write_bytes(array_file(found))
        own = np.load(tmp_path / "own.npy")
        assert own.dtype == array.dtype and own.shape == shape and np.array_equal(own, array)


def test_elements_in_fortrans_order_are_read_by_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    np.save(tmp_path / "f.npy", array)
    assert np.array_equal(read_array(tmp_path / "f.npy"), array)
    monkeypatch.setattr("inferd.cli.inference.array_files.find_numpy", lambda: None)
    with pytest.raises(Exception, match="which needs NumPy") as caught:
        read_array(tmp_path / "f.npy")
    assert "pip install" in str(getattr(caught.value, "hint", ""))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\1\0\xff\xff{",
        b"\x93NUMPY\2\0\xff\xff\xff\xff{}",
        b"\x93NUMPY\1\0\2\0{}",
        b"\x93NUMPY\1\0" + struct.pack("<H", 60) + b"(" * 60,
        b"\x93NUMPY\1\0" + struct.pack("<H", 59)
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }  ",
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(Exception, match=r"x\.npy is not a \.npy file"):
        read_array(tmp_path / "x.npy")


def test_names_of_files_stay_below_the_folder() -> None:
    assert file_names(["a", "../../a", "a/b:0", "", "\0", "a"]) == [
        *("a", "a-2", "a-b-0", "output", "output-2", "a-3")
    ]


def test_summaries_of_odd_values() -> None:
    def floats(*values: float) -> Tensor:
        data = struct.pack(f"{len(values)}f", *values)
        return Tensor(data=data, dimensions=[len(values)], type="fp32")

    nan = float("nan")
    assert values_text(floats()) == "none"
    assert values_text(floats(nan, 1)) == "nan 1"
    assert values_text(floats(*[nan] * 9)) == "nan nan nan nan …, all NaN"
    assert values_text(floats(*[1.0] * 8, float("inf"))).endswith("max inf at [8], mean nan")
    truth = Tensor(data=b"\0\1" * 5, dimensions=[10], type="bool")
    assert values_text(truth).startswith("false true false true …; min false, max true at [1]")


def test_a_graph_without_inputs_is_computed(daemon: RunningDaemon, tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    constant = helper.make_tensor("v", TensorProto.INT64, [2], [4, 5])
    made = graph([helper.make_node("Constant", [], ["y"], value=constant)], [], [("y", "i64", [2])])
    write_graphs(tmp_path, {"constant": made})
    with running_daemon(models_dir=tmp_path) as running:
        inferd("run", "constant", "--output", str(tmp_path), socket=running.socket)
    assert np.load(tmp_path / "y.npy").tolist() == [4, 5]

"""Graphs that OpenVINO computes, through the daemon: files, bytes, users, crashes and hangs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from inferd import (
    Client,
    InvalidArgument,
    InvalidEncoding,
    LoadFailed,
    OutOfMemory,
    Tensor,
    Timeout,
    WorkerCrashed,
)
from inferd.backends.openvino.model import engine_core
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd as run_inferd
from tests.daemon.graph_calls import (
    AFFINE,
    DAMAGED_FILES,
    affine_of,
    check_damaged_files,
    check_shown,
    context_on,
    damaged,
    floats,
    longs,
    state_of,
)
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.ir_graphs import write_ir
from tests.onnx_graphs import affine, allocation, graph, identity, loop, square, write_graphs
from tests.raw import RawClient
from tools.get_graphs import MISSING, basic_pitch

HANG_S = 3
"""A load that computes for twice as long is ended."""
INTEGER_MAX = (1 << 31) - 1
"""The largest integer of an input; as many iterations or elements are too many."""


def picking() -> bytes:
    """Return a graph that picks the elements of `d` at `i`; one far out of range ends the process
    of OpenVINO.
    """
    return graph(
        [helper.make_node("GatherND", ["d", "i"], ["y"])],
        [("d", "fp32", ["n"]), ("i", "i64", ["k", 1])],
        [("y", "fp32", ["k"])],
    )


def slow_to_load() -> bytes:
    """Return a graph whose constant part, which OpenVINO computes at the load, takes for ever."""
    from onnx import TensorProto

    size = helper.make_tensor("size", TensorProto.INT64, [2], [1 << 14, 1 << 14])
    return graph(
        [
            helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
            helper.make_node("MatMul", ["zeros", "zeros"], ["product"]),
            helper.make_node("ReduceSum", ["product"], ["sum"], keepdims=0),
            helper.make_node("Add", ["x", "sum"], ["y"]),
        ],
        [("x", "fp32", ["n"])],
        [("y", "fp32", ["n"])],
        [size],
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_ir(models, {"affine": affine(), "picking": picking(), "allocation": allocation()})
    write_ir(models, {"fresh": affine(), "damaged": affine()})
    (models / "damaged.xml").write_text((models / "damaged.xml").read_text()[:-20])
    graphs = {"other": affine(), "slow": slow_to_load(), "loop": loop(), "plain": affine()}
    write_graphs(models, graphs)
    (models / "settings.xml").write_text('<?xml version="1.0"?><settings/>')
    config = f"[daemon]\nworker-hang-timeout-s = {HANG_S}\n" + "".join(
        f'[models.{name}]\nbackend = "openvino"\nthreads = 1\n'
        for name in ("other", "slow", "loop", "plain")
    )
    config += (
        f'[models.named]\nfile = {json.dumps(str(models / "affine.xml"))}\nprecision = "bf16"\n'
    )
    with running_daemon(config, models_dir=models) as running:
        yield running


def test_files_of_the_models_directory_are_served(client: Client) -> None:
    for name, encoding in (
        ("affine", "openvino"),
        ("affine.xml", 0),
        ("affine", "autodetect"),
        ("named", "openvino"),
        ("other", "onnx"),
        ("other", "autodetect"),
    ):
        assert affine_of(client, client.load(name, encoding=encoding)) == AFFINE
        assert state_of(client, name)["backend"] == "openvino"
    for name, encoding in (("affine", "onnx"), ("other", "openvino"), ("affine", "tensorflow")):
        with pytest.raises(InvalidEncoding):
            client.load(name, encoding=encoding)


def test_bf16_has_the_digits_of_bf16_if_the_cpu_has_instructions_for_it(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"square": square()})
    file = json.dumps(str(tmp_path / "square.onnx"))
    config = "".join(
        f'[models.{precision}]\nfile = {file}\nbackend = "openvino"\nprecision = "{precision}"\n'
        for precision in ("f32", "bf16")
    )
    x = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float32)
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        found = {name: client.graph(name).run({"x": x})["y"] for name in ("f32", "bf16")}
    exact = x.astype(np.float64) @ x
    errors = {name: np.abs(y - exact) for name, y in found.items()}
    sums = np.abs(x).astype(np.float64) @ np.abs(x)  # of the products' magnitudes
    assert (errors["f32"] <= 128 * 2**-24 * sums).all()
    # Both factors of each product, and the sum, are rounded to 8 binary digits.
    assert (errors["bf16"] <= 1.01 * 2**-8 * sums + 2**-8 * np.abs(exact)).all()
    has_bf16 = "BF16" in engine_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    share = np.sqrt(np.square(errors["bf16"]).mean() / np.square(exact).mean())
    assert share > 2**-11 or not has_bf16, f"{share:.1e}: it has computed in f32"


def test_xml_that_is_not_a_graph_is_not_offered(daemon: RunningDaemon, client: Client) -> None:
    names = {one["name"] for one in client.models()}
    assert "affine" in names and "settings" not in names
    listed = run_inferd("models", "--all", socket=daemon.socket).stdout
    assert "settings.xml" in listed and "not a graph of OpenVINO" in listed


@pytest.mark.parametrize("encoding", ["openvino", "autodetect"])
def test_a_graph_is_loaded_from_its_bytes_and_from_its_files(
    client: Client, tmp_path: Path, encoding: str
) -> None:
    write_ir(tmp_path, {"mine": affine()})
    builders = [(tmp_path / f"mine.{end}").read_bytes() for end in ("xml", "bin")]
    assert builders[1]
    graph = client.load(builders, encoding=encoding)
    assert affine_of(client, graph) == AFFINE
    client.unload(graph)
    assert affine_of(client, client.load_file(tmp_path / "mine.xml")) == AFFINE


def test_weights_belong_to_a_graph_of_openvino_alone(daemon: RunningDaemon, tmp_path: Path) -> None:
    write_graphs(tmp_path, {"mine": affine()})
    with open(tmp_path / "mine.onnx", "rb") as file, RawClient(daemon.socket) as raw:
        fds = [file.fileno(), file.fileno()]
        with pytest.raises(InvalidArgument, match="encoding onnx has one file"):
            raw.call("load", fds, fd=0, weights={"fd": 1})
        with pytest.raises(InvalidEncoding, match="is a folder"):
            raw.call("load", fds[:1], fd=0, encoding="tensorflow")
        assert raw.call("load", fds[:1], fd=0)["tensors"]


def test_show_and_ps_print_inputs_and_outputs(daemon: RunningDaemon, client: Client) -> None:
    shown = check_shown(daemon, client, "affine", "openvino")
    sizes = [Path(shown["file"]).with_suffix(end).stat().st_size for end in (".xml", ".bin")]
    assert shown["size_bytes"] == sum(sizes)


def test_show_prints_inputs_and_outputs_before_the_first_load(
    daemon: RunningDaemon, client: Client
) -> None:
    for name, rows in (("fresh", "?"), ("plain", "n")):
        text = run_inferd("show", name, socket=daemon.socket).stdout
        assert "state    not loaded\n  device   " in text
        shape = f"fp32 [{rows}, 2]"
        assert f"Inputs\n  a   {shape}\n  b   {shape}\n\nOutputs\n  y   {shape}\n" in text
        assert [info.name for info in client.graph(name).inputs] == ["a", "b"]
        assert state_of(client, name)["info"] is None, "nothing was loaded"
        before = [
            one["name"] for key in ("inputs", "outputs") for one in state_of(client, name)[key]
        ]
        client.load(name)
        shown = state_of(client, name)
        assert before == [one["name"] for key in ("inputs", "outputs") for one in shown[key]]
    text = run_inferd("show", "damaged", socket=daemon.socket).stdout
    assert "is not an OpenVINO file" in text and "Inputs" not in text


def test_inputs_that_end_the_process_are_refused_and_others_are_computed(client: Client) -> None:
    numbers = floats(1, 2, 3, dimensions=[3])
    context, pid = context_on(client, "picking"), state_of(client, "picking")["pid"]
    for _ in range(2):  # the second time without a process
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            client.compute(context, {"d": numbers, "i": longs(INTEGER_MAX, dimensions=[1, 1])})
    outputs = client.compute(context, {"d": numbers, "i": longs(2, dimensions=[1, 1])}).outputs
    assert outputs[0][1].data == floats(3).data
    assert state_of(client, "picking")["pid"] not in (0, pid)


def looped(times: int) -> dict[str, Tensor]:
    return {"x": floats(1, 2, dimensions=[2]), "times": longs(times, dimensions=[])}


def test_a_cancelled_computation_that_goes_on_is_killed_and_others_are_computed(
    client: Client,
) -> None:
    context = context_on(client, "loop")
    pid = state_of(client, "loop")["pid"]
    with pytest.raises(Timeout):
        client.compute(context, looped(INTEGER_MAX), timeout=0.2)
    assert client.compute(context_on(client, "loop"), looped(3)).outputs
    assert state_of(client, "loop")["pid"] not in (0, pid)


def test_a_computation_past_the_limit_on_memory_fails(client: Client) -> None:
    context = context_on(client, "allocation")
    with pytest.raises(OutOfMemory, match="too little memory for the computation"):
        client.compute(context, {"n": longs(INTEGER_MAX, dimensions=[1])})
    outputs = client.compute(context, {"n": longs(1 << 10, dimensions=[1])}).outputs
    assert outputs[0][1].data == bytes(4)


def test_a_load_that_computes_constants_for_ever_is_ended(client: Client) -> None:
    with pytest.raises(LoadFailed, match=f"has computed for more than {2 * HANG_S} s"):
        client.load("slow")
    with pytest.raises(LoadFailed, match=r"\(failed .* s ago"):  # at once
        client.load("slow")
    assert affine_of(client, client.load("affine")) == AFFINE


def test_users_get_the_outputs_of_their_own_inputs(tmp_path: Path) -> None:
    write_ir(tmp_path, {"copy": identity("u8", shape=["n", "m"])})
    config = f"[models.shared]\nfile = {json.dumps(str(tmp_path / 'copy.xml'))}\n"
    with daemon_for_all(config) as daemon, client_of(daemon, ADA) as a, client_of(daemon, BOB) as b:
        users = [(one, one.context("shared"), mark) for one, mark in ((a, 0x11), (b, 0x22))]
        for size in (1, 50, 2, 3000, 1):
            requests = []
            for raw, context, mark in users:
                tensor = {"data": bytes([mark]) * 2 * size, "dimensions": [2, size], "type": "u8"}
                wrong = tensor | {"dimensions": [2 * size]}
                for refused in ([["x0", wrong]], []):
                    with pytest.raises(InvalidArgument):
                        raw.call("compute", context=context, inputs=refused)
                inputs = [["x0", tensor]]
                requests.append(raw.start_request("compute", context=context, inputs=inputs))
            for (raw, _, mark), number in zip(users, requests, strict=True):
                [(_, output)] = raw.wait_result(number)["outputs"]
                assert output["data"] == bytes([mark]) * 2 * size
                assert output["dimensions"] == [2, size]


def test_damaged_files_are_typed_errors_and_disturb_no_other_graph(tmp_path: Path) -> None:
    rng = random.Random(7)
    write_ir(tmp_path, {"whole": affine()})
    graph, weights = ((tmp_path / f"whole.{end}").read_bytes() for end in ("xml", "bin"))
    names = [f"mutant{number}" for number in range(DAMAGED_FILES)]
    for number, name in enumerate(names):
        changed = damaged(graph, number, rng, least=len(graph) // 2)
        (tmp_path / f"{name}.xml").write_bytes(changed)
        (tmp_path / f"{name}.bin").write_bytes(weights[: rng.randrange(len(weights) + 1)])
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        check_damaged_files(client, names)


def test_damaged_saved_models_are_typed_errors_and_disturb_no_other_graph(tmp_path: Path) -> None:
    rng, formats = random.Random(7), basic_pitch()
    assert formats is not None, MISSING
    whole = formats / "nmp"
    files = sorted(one for one in whole.rglob("*") if one.is_file())
    assert {one.name for one in files} >= {"saved_model.pb", "variables.index"}
    write_ir(tmp_path, {"whole": affine()})
    names = [f"mutant{number}" for number in range(DAMAGED_FILES)]
    for number, name in enumerate(names):
        for file in files:
            data = file.read_bytes()
            if file.name == "saved_model.pb" or number % 5 == 4:
                data = damaged(data, number, rng)
            target = tmp_path / name / file.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    config = f"[daemon]\nworker-hang-timeout-s = {HANG_S}\n[defaults]\nthreads = 1\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        check_damaged_files(client, names)


def test_the_files_of_a_graph_need_not_be_readable_by_name(client: Client, tmp_path: Path) -> None:
    write_ir(tmp_path, {"mine": affine()})
    opened = [os.open(tmp_path / f"mine.{end}", os.O_RDONLY) for end in ("xml", "bin")]
    for end in ("xml", "bin"):
        (tmp_path / f"mine.{end}").unlink()
    graph = client.load(fd=opened[0], weights_fd=opened[1])
    assert affine_of(client, graph) == AFFINE
    for fd in opened:
        os.close(fd)

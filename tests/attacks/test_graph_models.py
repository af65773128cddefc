"""Graphs that were made to harm: each load and computation ends in time, with a typed error or with
outputs, in bounded memory, and another graph is served all the while.
"""

from __future__ import annotations

import json
import resource
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import onnx
import psutil
import pytest
from ai_edge_litert import schema_py_generated as schema
from onnx import TensorProto, helper

from inferd import (
    BackendError,
    Client,
    Graph,
    InferdError,
    LoadFailed,
    OutOfMemory,
    Tensor,
    TensorGraph,
    WorkerCrashed,
)
from inferd.scheduler.worker import GRAPH_SPARE_BYTES
from inferd.testing import RunningDaemon, running_daemon
from tests import tflite_graphs
from tests.daemon.graph_calls import floats, integers, state_of
from tests.ir_graphs import write_ir
from tests.onnx_graphs import affine, graph, loop, write_graphs

HANG_S = 2
"""A computation is ended after this time, and a load that computes after twice as much."""
LATE_S_MAX = 60
"""The most time by which a busy machine may delay the end: CPU time counts in a load."""
PROCESS_BYTES = 1 << 30
"""The most memory of a graph's process besides that of its tensors."""
DATA_BYTES = 1 << 30
"""The memory that the daemon and its processes may allocate here, by a limit of the system that a
process of a graph keeps. On a busy machine 4 GiB take longer to fill than `HANG_S`.
"""
PAUSE_S = 0.03
"""The pause between computations of the other graph."""
LARGE, FOREVER = 6 << 10, (1 << 31) - 1
SECRET = struct.pack("f", 9)
X = {"x": floats(1, 2, dimensions=[2])}


def product() -> bytes:
    """Return a graph with a constant part that takes for ever: a product of large matrices."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1, 1], [0.5])
    size = helper.make_tensor("size", TensorProto.INT64, [2], [LARGE, LARGE])
    nodes = [
        helper.make_node("Expand", ["one", "size"], ["m0"]),
        *(helper.make_node("MatMul", [f"m{n}"] * 2, [f"m{n + 1}"]) for n in range(8)),
        helper.make_node("ReduceMax", ["m8"], ["most"], keepdims=0),
        helper.make_node("Add", ["x", "most"], ["y"]),
    ]
    return graph(nodes, [("x", "fp32", ["n"])], [("y", "fp32", ["n"])], [one, size])


def endless() -> bytes:
    """Return a graph with a constant part that is a loop without an end."""
    model = onnx.load_from_string(loop())
    made = model.graph
    made.node[0].input[2] = "start"
    for name, kind, shape, value in (
        ("start", TensorProto.FLOAT, [1], 1.0),
        ("times", TensorProto.INT64, [], FOREVER),
    ):
        made.initializer.append(helper.make_tensor(name, kind, shape, [value]))
    made.node.append(helper.make_node("Add", ["x", "y"], ["z"]))
    made.output[0].name = "z"
    made.input.remove(next(one for one in made.input if one.name == "times"))
    return bytes(model.SerializeToString())


def doubling(*, constant: bool) -> bytes:
    """Return a graph whose tensors grow to 2³² numbers, at its load if it is *constant*."""
    nodes = [helper.make_node("Concat", [f"t{n}"] * 2, [f"t{n + 1}"], axis=0) for n in range(31)]
    nodes.append(helper.make_node("ReduceMax", ["t31"], ["most"], keepdims=0))
    nodes.append(helper.make_node("Add", ["x", "most"], ["y"]))
    weights = [helper.make_tensor("t0", TensorProto.FLOAT, [2], [1, 2])] if constant else []
    if not constant:
        nodes.insert(0, helper.make_node("Identity", ["x"], ["t0"]))
    return graph(nodes, [("x", "fp32", ["n"])], [("y", "fp32", ["n"])], weights)


def chain(length: int) -> bytes:
    """Return a graph that adds 1 so often."""
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1])
    names = ["x", *(f"v{n}" for n in range(1, length)), "y"]
    nodes = [helper.make_node("Add", [a, "one"], [b]) for a, b in pairwise(names)]
    return graph(nodes, [("x", "fp32", ["n"])], [("y", "fp32", ["n"])], [one])


def branches(depth: int) -> bytes:
    """Return a graph of conditions within each other, with two branches each."""

    def branch(level: int, path: str) -> onnx.GraphProto:
        out, value = f"y{path}", helper.make_tensor_value_info
        if level:
            node = helper.make_node(
                "If",
                ["c"],
                [out],
                then_branch=branch(level - 1, f"{path}t"),
                else_branch=branch(level - 1, f"{path}e"),
            )
        else:
            node = helper.make_node("Add", ["x", "one"], [out])
        return helper.make_graph([node], f"g{path}", [], [value(out, TensorProto.FLOAT, ["n"])])

    made = branch(depth, "")
    one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1])
    condition = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    node = made.node[0]
    node.output[0] = "y"
    return graph([node], [("x", "fp32", ["n"])], [("y", "fp32", ["n"])], [one, condition])


ONNX: Mapping[str, Callable[[], bytes]] = {
    "product": product,
    "endless": endless,
    "doubling": partial(doubling, constant=False),
    "doubled": partial(doubling, constant=True),
    "chain": partial(chain, 20_000),
    "branches": partial(branches, 10),
}
"""The graphs by name; making all takes a second."""


@contextmanager
def bounded_memory(daemon: RunningDaemon) -> Iterator[None]:
    """Check during the body that no process of a graph takes more memory than its limit."""
    over, most = threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.02):
            for process in psutil.Process(daemon.pid).children():
                try:
                    most[0] = max(most[0], process.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert 0 < most[0] <= DATA_BYTES + PROCESS_BYTES


@contextmanager
def served_whole(daemon: RunningDaemon) -> Iterator[Client]:
    """Check after the body that the graph `whole` has computed in one process all the while."""
    over, failures = threading.Event(), list[BaseException]()
    with (
        Client(daemon.socket) as client,
        Client(daemon.socket) as other,
        other.graph("whole") as graph,
    ):
        pid = state_of(other, "whole")["pid"]

        def compute() -> None:
            try:
                while not over.wait(PAUSE_S):
                    check_whole(graph)
            except BaseException as exc:
                failures.append(exc)

        thread = threading.Thread(target=compute)
        thread.start()
        try:
            with bounded_memory(daemon):
                yield client
        finally:
            over.set()
            thread.join()
        assert failures == []
        check_whole(graph)
        assert state_of(other, "whole")["pid"] == pid


def check_whole(graph: TensorGraph) -> None:
    """Check the result of the graph of `affine`."""
    found = graph.run({"a": [[1, 2]], "b": [[10, 20]]})["y"]
    assert found.tolist() == [[12, 24]]


def outcome_of(client: Client, model: str, inputs: Mapping[str, Tensor]) -> InferdError | None:
    """Load a model and compute, each within its time; return the error, if there is one."""
    begun = time.monotonic()
    try:
        loaded: Graph | None = None
        try:
            loaded = client.load(model)
        finally:
            assert time.monotonic() - begun <= 2 * HANG_S + 1 + LATE_S_MAX, "the load ends in time"
        begun = time.monotonic()
        try:
            client.compute(client.init_execution_context(loaded), inputs)
        finally:
            assert time.monotonic() - begun <= HANG_S + 1 + LATE_S_MAX, "the computation, too"
    except InferdError as exc:
        assert exc.message.isprintable() and exc.hint
        return exc
    finally:
        if loaded is not None:
            client.unload(loaded)
    return None


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, {"whole": affine(), **{name: make() for name, make in ONNX.items()}})
    lines = [f"[daemon]\ncores = 2\nworker-hang-timeout-s = {HANG_S}\n[defaults]\nthreads = 1\n"]
    lines += [
        f'[models.{name}-openvino]\nfile = {json.dumps(str(models / name))[:-1]}.onnx"\n'
        'backend = "openvino"\n'
        for name in ONNX
    ]
    with limited_daemon("".join(lines), models) as running:
        yield running


@contextmanager
def limited_daemon(config: str, models: Path) -> Iterator[RunningDaemon]:
    """Run a daemon whose processes may allocate `DATA_BYTES`."""
    with running_daemon(config, models_dir=models) as running:
        resource.prlimit(running.pid, resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        yield running


def test_the_process_of_a_graph_has_a_limit_on_its_memory(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"whole": affine()})
    tflite_graphs.write_graphs(tmp_path, {"lite": tflite_graphs.loop()})
    config = f'[models.openvino]\nfile = "{tmp_path}/whole.onnx"\nbackend = "openvino"\n'
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        for name in ("whole", "lite", "openvino"):
            client.load(name)
            limit, _ = resource.prlimit(state_of(client, name)["pid"], resource.RLIMIT_DATA)
            assert GRAPH_SPARE_BYTES < limit <= GRAPH_SPARE_BYTES + PROCESS_BYTES


@pytest.mark.timeout(180)
@pytest.mark.parametrize("engine", ["", "-openvino"])
@pytest.mark.parametrize("name", ONNX)
def test_a_hostile_graph_ends_in_time_and_in_bounded_memory(
    daemon: RunningDaemon, name: str, engine: str
) -> None:
    with served_whole(daemon) as client:
        error = outcome_of(client, name + engine, X)
        if name in ("product", "endless"):
            assert isinstance(error, LoadFailed | WorkerCrashed | OutOfMemory)
        elif name.startswith("doubl"):
            assert isinstance(error, LoadFailed | OutOfMemory)


def lite_doubling() -> bytes:
    """Return a graph in TensorFlow Lite whose tensors grow to 2³² numbers."""
    options = schema.ConcatenationOptionsT()
    concat = schema.BuiltinOptions.ConcatenationOptions, options
    operator = schema.BuiltinOperator.CONCATENATION
    names = ["x", *(f"t{n}" for n in range(30)), "y"]
    pairs = list(pairwise(names))
    return tflite_graphs.model(
        tflite_graphs.Subgraph(
            [tflite_graphs.Tensor(name, shape=("n",)) for name in names],
            [tflite_graphs.Node(operator, [a, a], [b], concat) for a, b in pairs],
            ["x"],
            ["y"],
        )
    )


@pytest.mark.timeout(180)
def test_hostile_graphs_of_tensorflow_lite_end_in_time_and_in_bounded_memory(
    tmp_path: Path,
) -> None:
    write_graphs(tmp_path, {"whole": affine()})
    graphs = {"doubling": lite_doubling(), "endless": tflite_graphs.loop()}
    tflite_graphs.write_graphs(tmp_path, graphs)
    config = f"[daemon]\ncores = 2\nworker-hang-timeout-s = {HANG_S}\n[defaults]\nthreads = 1\n"
    with limited_daemon(config, tmp_path) as daemon, served_whole(daemon) as client:
        error = outcome_of(client, "doubling", X)
        assert isinstance(error, LoadFailed | BackendError)
        error = outcome_of(client, "endless", {"times": integers(FOREVER, dimensions=[])})
        assert isinstance(error, WorkerCrashed)


NAME = b"abcdefgh"
BAD_NAMES = (b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe", b"\xc3\xc3\xa4\x80abcd", b"a\n\x1b[31mb")
"""Bytes that are not UTF-8, and an order to a terminal."""


def named() -> dict[str, bytes]:
    """Return a graph whose input has the name `NAME`, by the endings of its files."""
    node = helper.make_node("Relu", [NAME.decode()], ["y"])
    made = graph([node], [(NAME.decode(), "fp32", [2])], [("y", "fp32", [2])])
    lite = tflite_graphs.model(
        tflite_graphs.Subgraph(
            [tflite_graphs.Tensor(name, shape=(2,)) for name in (NAME.decode(), "y")],
            [tflite_graphs.Node(schema.BuiltinOperator.RELU, [NAME.decode()], ["y"])],
            [NAME.decode()],
            ["y"],
        )
    )
    return {"onnx": made, "tflite": lite}


def test_names_that_are_not_texts_are_refused_or_served_as_they_are(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"whole": affine()})
    files = named()
    write_ir(tmp_path, {"ir": files["onnx"]})
    files["xml"] = (tmp_path / "ir.xml").read_bytes()
    names = []
    for ending, data in files.items():
        assert NAME in data
        for number, bad in enumerate(BAD_NAMES):
            names.append(f"{ending}{number}")
            (tmp_path / f"{names[-1]}.{ending}").write_bytes(data.replace(NAME, bad))
            (tmp_path / f"{names[-1]}.bin").write_bytes(b"")
    config = (
        "".join(
            f"[models.openvino{n}]\nfile = {json.dumps(str(tmp_path / f'onnx{n}.onnx'))}\n"
            'backend = "openvino"\n'
            for n in range(len(BAD_NAMES))
        )
        + "[defaults]\nthreads = 1\n"
    )
    names += [f"openvino{n}" for n in range(len(BAD_NAMES))]
    with running_daemon(config, models_dir=tmp_path) as daemon, served_whole(daemon) as client:
        served = set()
        for name in names:
            try:
                declared = client.graph(name).inputs
                with client.graph(name) as opened:
                    [found] = opened.run({opened.inputs[0].name: [-1, 2]}).values()
                    assert found.tolist() == [0, 2]
            except InferdError as exc:
                assert exc.message.isprintable() and exc.hint
            else:
                assert declared == opened.inputs
                served.add(name)
        assert {name for name in served if not name.endswith("2")} == set()


def external(location: str) -> bytes:
    """Return the graph of `affine`, whose factor is in another file."""
    model = onnx.load_from_string(affine())
    [weight] = model.graph.initializer
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "4")):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    return bytes(model.SerializeToString())


def test_weights_are_read_from_the_folder_of_their_graph_alone(tmp_path: Path) -> None:
    models, other = tmp_path / "models", tmp_path / "secret.bin"
    other.write_bytes(SECRET)
    (models / "sub").mkdir(parents=True)
    (models / "sub" / "w.bin").write_bytes(struct.pack("f", 2))
    (models / "link.bin").symlink_to(other)
    elsewhere = {
        "absolute": str(other),
        "parent": "../secret.bin",
        "detour": "sub/../../secret.bin",
        "link": "link.bin",
        "device": "/dev/zero",
        "missing": "missing.bin",
    }
    write_graphs(models, {"whole": affine(), "inside": external("sub/w.bin")})
    write_graphs(models, {name: external(location) for name, location in elsewhere.items()})
    config = "".join(
        f"[models.{name}-openvino]\nfile = {json.dumps(str(models / f'{name}.onnx'))}\n"
        'backend = "openvino"\n'
        for name in ("inside", *elsewhere)
    )
    with running_daemon(config, models_dir=models) as daemon, served_whole(daemon) as client:
        for engine in ("", "-openvino"):
            check_whole(client.graph(f"inside{engine}"))
            for name in elsewhere:
                with pytest.raises(LoadFailed) as caught:
                    client.load(f"{name}{engine}")
                assert caught.value.message.isprintable() and caught.value.hint


def test_a_graph_from_a_descriptor_reads_no_other_file(tmp_path: Path) -> None:
    """The process of a graph may read files that the user who passes a graph may not."""
    (tmp_path / "w.bin").write_bytes(SECRET)
    write_graphs(tmp_path, {"whole": affine()})
    locations = ("w.bin", str(tmp_path / "w.bin"), *map(str, range(3, 9)))
    with running_daemon(models_dir=tmp_path) as daemon, served_whole(daemon) as client:
        loads: tuple[Callable[[], Graph], ...] = (
            lambda: client.load_file(tmp_path / "own.onnx"),
            lambda: client.load((tmp_path / "own.onnx").read_bytes()),
        )
        for location in locations:
            write_graphs(tmp_path, {"own": external(location)})
            for load in loads:
                with pytest.raises(LoadFailed, match="has weights in another file"):
                    load()
        assert client.load_file(tmp_path / "whole.onnx").tensors

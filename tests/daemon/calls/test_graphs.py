"""Graphs in ONNX through the daemon: names and indices, types, refusals, crashes and hangs."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from inferd import (
    Cancelled,
    Client,
    InferdError,
    InvalidArgument,
    InvalidEncoding,
    LoadFailed,
    OutOfMemory,
    Tensor,
    Timeout,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.daemon.workers.process import cpu_seconds
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document
from tests.daemon.command_line import inferd as run_inferd
from tests.daemon.graph_calls import (
    DAMAGED_FILES,
    check_damaged_files,
    context_on,
    damaged,
    floats,
    integers,
    longs,
    state_of,
)
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.onnx_graphs import (
    affine,
    allocation,
    division,
    graph,
    identity,
    loop,
    square,
    write_graphs,
)
from tests.raw import RawClient

GRAPHS = {
    "affine": affine(),
    "division": division(),
    "loop": loop(),
    "types": identity("bool", "u8", "bf16"),
    "strings": identity("string", "i32"),
    "complex": identity("complex64"),
    "broken": b"\x08\x0a" + bytes(100),
    "allocation": allocation(),
    "odd": identity("u8", "i64", shape=[]),
    "square": square(),
}
FOREVER = 1 << 62


def magika_file() -> Path:
    spec = importlib.util.find_spec("magika")
    assert spec is not None and spec.origin is not None
    [file] = Path(spec.origin).parent.glob("models/standard_v3_*/model.onnx")
    return file


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    write_graphs(models, GRAPHS)
    config = f"""
[daemon]
worker-hang-timeout-s = 3
cores = 3
[models.magika]
file = {json.dumps(str(magika_file()))}
threads = 1
[models.named]
of = "affine"
[models.counted]
file = {json.dumps(str(models / "affine.onnx"))}
[models.quick]
file = {json.dumps(str(models / "affine.onnx"))}
latency = true
batch-max = 1
threads = 2
[models.square]
latency = true
threads = 2
"""
    with running_daemon(config, models_dir=models) as running:
        yield running


def looped(times: int) -> dict[str, Tensor]:
    return {
        "x": floats(1, 2, dimensions=[2]),
        "times": longs(times),
    }


def engine_statistics(client: Client, model: str) -> dict[str, Any]:
    """Wait until a worker has answered within the second that `stats` allows."""
    while model not in (found := client.stats()["models"]):
        pass
    return dict(found[model])


def counts_of(client: Client, model: str) -> tuple[int, int]:
    """Return how many computations of a model run and wait."""
    found = engine_statistics(client, model)
    return found["computations_running"], found["computations_waiting"]


def test_a_file_of_the_models_directory_is_served_by_name_and_by_index(client: Client) -> None:
    graph = client.load("affine", encoding="onnx")
    assert graph.tensors and graph.ctx_size == 0
    context = client.init_execution_context(graph)
    named = client.compute(context, {"b": floats(10, 20), "a": floats(1, 2)}).outputs
    assert named == [("y", Tensor(data=floats(12, 24).data, dimensions=[1, 2], type=1))]
    client.set_input(context, 0, floats(1, 2))
    client.set_input(context, 1, floats(5, 5))
    client.compute(context)
    assert client.get_output(context, 0) == floats(7, 9).data
    mixed = client.compute(context, {"1": floats(0, 0), "a": floats(1, 2)}).outputs
    assert mixed[0][1].data == floats(2, 4).data


@pytest.mark.parametrize("encoding", ["onnx", 1, "autodetect", 5])
def test_a_graph_is_loaded_by_its_encoding_or_without_one(client: Client, encoding: object) -> None:
    for name in ("affine", "affine.onnx", "named"):
        assert client.load(name, encoding=encoding).tensors  # type: ignore[arg-type]
    assert client.load_by_name("affine").tensors


def test_other_encodings_are_refused(client: Client) -> None:
    for name, encoding in (("affine", "ggml"), ("echo", "onnx"), ("affine", "pytorch")):
        with pytest.raises(InvalidEncoding):
            client.load(name, encoding=encoding)
    assert state_of(client, "echo")["leases"] == 0


@pytest.mark.parametrize("encoding", ["onnx", "autodetect"])
def test_a_graph_is_loaded_from_a_descriptor(
    daemon: RunningDaemon, tmp_path: Path, encoding: str
) -> None:
    write_graphs(tmp_path, {"mine": affine()})
    with open(tmp_path / "mine.onnx", "rb") as file, RawClient(daemon.socket) as raw:
        graph = raw.call("load", [file.fileno()], fd=0, encoding=encoding)["graph"]
        context = raw.call("init_execution_context", graph=graph)["context"]
        values = {"data": floats(1, 2).data, "dimensions": [1, 2], "type": "fp32"}
        result = raw.call("compute", context=context, inputs=[["a", values], ["b", values]])
        assert result["outputs"][0][1]["data"] == floats(3, 6).data


def test_the_result_of_a_graph_has_no_metadata_of_a_turn(client: Client) -> None:
    context = context_on(client, "affine")
    inputs = {"a": floats(1, 2), "b": floats(0, 0)}
    assert client.compute(context, inputs).metadata == {}
    assert json.loads(client.get_output(context, 1))["output_tokens"] == 0


def test_inputs_are_checked_when_they_are_set(client: Client) -> None:
    context = context_on(client, "affine")
    for index, tensor, message in (
        (2, floats(1, 2), "no input 2"),
        (0, integers(1, 2), "got a tensor of i32"),
        (0, floats(1, 2, 3), r"\[1, 3\]"),
        (1, Tensor(data=bytes(9), dimensions=[1, 2], type="fp32"), "got 9 bytes"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            client.set_input(context, index, tensor)
    with pytest.raises(InvalidArgument, match=r"'a' .* is missing"):
        client.compute(context)
    client.set_input(context, 0, floats(1, 2))
    with pytest.raises(InvalidArgument, match=r"'b' .* is missing"):
        client.compute(context)
    with pytest.raises(InvalidArgument, match="no input 'c'"):
        client.compute(context, {"a": floats(1, 2), "b": floats(1, 2), "c": floats(1, 2)})


def test_types_have_numbers_of_several_hosts_and_names(client: Client) -> None:
    context = context_on(client, "types")
    outputs = client.compute(
        context,
        {
            "x0": Tensor(data=b"\1\0", dimensions=[2], type="bool"),
            "x1": Tensor(data=b"ab", dimensions=[2], type=2),  # u8 in wasi-nn's first version
            "x2": Tensor(data=b"", dimensions=[0], type="bf16"),
        },
    ).outputs
    assert outputs == [
        ("y0", Tensor(data=b"\1\0", dimensions=[2], type="bool")),
        ("y1", Tensor(data=b"ab", dimensions=[2], type=3)),
        ("y2", Tensor(data=b"", dimensions=[0], type=6)),
    ]
    with pytest.raises(InvalidArgument, match="tensor type"):
        client.set_input(context, 0, Tensor(data=b"", dimensions=[0], type="i4"))


def test_bytes_at_index_1_are_an_input_if_they_fit_and_else_parameters(client: Client) -> None:
    context = context_on(client, "types")
    client.set_input(context, 1, Tensor(data=b"{}", dimensions=[2], type="u8"))
    client.set_input(context, 0, Tensor(data=b"\0", dimensions=[1], type="bool"))
    client.set_input(context, 2, Tensor(data=b"", dimensions=[0], type="bf16"))
    client.compute(context)
    assert [client.get_output(context, index) for index in range(3)] == [b"\0", b"{}", b""]
    other = context_on(client, "affine")
    client.set_input(other, 1, b'{"temp": 0.5}')
    client.set_input(other, 1, floats(1, 2))


def strings(*values: bytes, dimensions: list[int] | None = None) -> Tensor:
    data = b"".join(struct.pack("<I", len(value)) + value for value in values)
    shape = [len(values)] if dimensions is None else dimensions
    return Tensor(data=data, dimensions=shape, type="string")


def test_strings_pass_by_name_and_by_index(client: Client) -> None:
    context = context_on(client, "strings")
    given = strings(b"", "\u00e4\0".encode(), b"x" * 70_000)
    outputs = client.compute(context, {"x0": given, "x1": integers(1)}).outputs
    assert outputs[0] == ("y0", given)
    client.set_input(context, 0, given)
    client.set_input(context, 1, integers(7))
    client.compute(context)
    assert client.get_output(context, 0) == given.data
    info = state_of(client, "strings")["info"]
    assert info["inputs"][0] == {"name": "x0", "type": "string", "shape": ["n"]}
    assert info["no_batches"] == "the input 'x0' (string [n]) has strings"


def test_strings_that_do_not_fit_are_refused(client: Client) -> None:
    context = context_on(client, "strings")
    many = Tensor(data=bytes(4) * 65_537, dimensions=[65_537], type="string")
    for tensor, kind, message in (
        (strings(b"a", dimensions=[2]), InvalidArgument, r"got 1 strings in the shape \[2\]"),
        (Tensor(data=b"\2\0\0\0a", dimensions=[1], type="string"), InvalidArgument, "cut off"),
        (Tensor(data=b"\2\0", dimensions=[1], type="string"), InvalidArgument, "cut off"),
        (Tensor(data=b"a", dimensions=[1], type="u8"), InvalidArgument, "got a tensor of u8"),
        (many, TooLarge, "more than 65536 strings"),
    ):
        with pytest.raises(kind, match=message):
            client.set_input(context, 0, tensor)
    with pytest.raises(InvalidArgument, match=r"'x0' .* got a string that is not UTF-8"):
        client.compute(context, {"x0": strings(b"\xff"), "x1": integers(1)})
    empty = Tensor(data=b"", dimensions=[0], type="string")
    assert client.compute(context, {"x0": empty, "x1": integers(1)}).outputs[0] == ("y0", empty)


def test_a_prompt_is_not_a_tensor_of_strings(client: Client) -> None:
    context = context_on(client, "echo")
    with pytest.raises(InvalidArgument, match="the prompt is a tensor of strings"):
        client.set_input(context, 0, strings(b"hi"))
    given = strings(b"hi", b"ho")
    assert client.compute(context, {"x": given}).outputs == [("x", given)]


def test_scalars_pass_by_index(client: Client) -> None:
    context = context_on(client, "odd")
    client.set_input(context, 0, Tensor(data=b"a", dimensions=[], type="u8"))
    client.set_input(context, 1, Tensor(data=bytes(8), dimensions=[1], type="i64"))
    client.compute(context)
    assert (client.get_output(context, 0), client.get_output(context, 1)) == (b"a", bytes(8))


def test_calls_of_language_models_are_refused(client: Client) -> None:
    graph = client.load("affine")
    context = client.init_execution_context(graph)
    calls = (
        lambda: client.prompt_compute(context, "hi"),
        lambda: client.compute_single(context),
        lambda: client.tokenize(graph, "hi"),
        lambda: client.embed(graph, ["hi"]),
        lambda: list(client.stream(context, "hi")),
        lambda: client.run_inference(context, "hi"),
    )
    for call in calls:
        with pytest.raises((UnsupportedOperation, InvalidArgument)):
            call()
    assert client.compute(context, {"a": floats(1, 2), "b": floats(0, 0)}).outputs


def test_graphs_that_cannot_be_served_are_refused(client: Client) -> None:
    with pytest.raises(UnsupportedOperation, match="of type complex64"):
        client.load("complex")
    with pytest.raises(LoadFailed):
        client.load("broken")


def test_show_and_ps_print_inputs_and_outputs(daemon: RunningDaemon, client: Client) -> None:
    client.load("affine")
    shown = state_of(client, "affine")
    assert (shown["backend"], shown["state"], shown["reads"]) == ("onnx", "ready", [])
    assert shown["file_error"] is None and shown["memory"]["weights"] > 0
    assert shown["info"]["inputs"] == [
        {"name": "a", "type": "fp32", "shape": ["n", 2]},
        {"name": "b", "type": "fp32", "shape": ["n", 2]},
    ]
    text = run_inferd("show", "affine", socket=daemon.socket).stdout
    assert "Inputs\n  a   fp32 [n, 2]\n  b   fp32 [n, 2]\n\nOutputs\n  y   fp32 [n, 2]\n" in text
    assert "KV states" not in text and "tokens in each" not in text
    assert "Batches\n  rows   up to 32 of several inputs at a time\n" in text
    assert (shown["info"]["batch_max"], shown["info"]["no_batches"]) == (32, "")
    loaded = run_inferd("ps", socket=daemon.socket).stdout
    assert "fp32 [n, 2], fp32 [n, 2] → fp32 [n, 2]" in loaded
    [model] = [
        m
        for m in document(run_inferd("ps", "--json", socket=daemon.socket))["models"]
        if m["name"] == "affine"
    ]
    assert model["info"]["outputs"] == [{"name": "y", "type": "fp32", "shape": ["n", 2]}]


def test_show_prints_why_inputs_of_a_graph_are_not_computed_together(
    daemon: RunningDaemon, client: Client
) -> None:
    for name, reason in (
        ("odd", "the input 'x0' (u8 []) has no first dimension"),
        ("quick", "batch-max is 1"),
    ):
        client.load(name)
        info = state_of(client, name)["info"]
        assert (info["batch_max"], info["no_batches"]) == (1, reason)
        assert (
            f"Batches\n  rows   none: {reason}\n"
            in run_inferd("show", name, socket=daemon.socket).stdout
        )


def test_a_graph_has_a_lane_for_each_thread_or_one_with_all_of_them(client: Client) -> None:
    for name, lanes in (("affine", 3), ("quick", 1), ("magika", 1)):
        context = context_on(client, name)
        if name == "quick":
            outputs = client.compute(context, {"a": floats(1, 2), "b": floats(0, 1)}).outputs
            assert outputs[0][1].data == floats(2, 5).data
        assert engine_statistics(client, name)["lanes"] == lanes


def test_threads_of_a_graph_that_wait_use_no_cpu_time(client: Client) -> None:
    """By default, threads of ONNX Runtime spin for some milliseconds after each computation."""
    pause, calls, size = threading.Event(), 20, 256
    x = np.ones((size, size), np.float32)
    with client.graph("square") as graph:
        graph.run({"x": x})
        pid = state_of(client, "square")["pid"]
        before = cpu_seconds(pid)
        for _ in range(calls):
            pause.wait(0.02)
            assert graph.run({"x": x})["y"][0, 0] == size
        assert cpu_seconds(pid) - before < 0.008 * calls


def test_a_graph_that_is_never_idle_shares_the_cores_with_a_language_model(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"busy": loop()})
    config = "[daemon]\ncores = 2\n[models.slow]\nbackend = 'echo'\necho = { step-ms = 50 }\n"
    with running_daemon(config, models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        session = client.init_execution_context(client.load("slow"))
        with RawClient(daemon.socket) as raw:
            contexts = [raw.context("busy") for _ in range(3)]  # loaded with all cores
            with client.stream(session, "word " * 600) as turn:
                next(iter(turn))
                inputs = [[name, message_of(tensor)] for name, tensor in looped(FOREVER).items()]
                for context in contexts:
                    raw.start_request("compute", context=context, inputs=inputs)
                while engine_statistics(client, "busy")["threads"] > 1:
                    pass
                assert client.queue(), "the language model still answers"
                [listed] = [model for model in client.models() if model["name"] == "busy"]
                assert listed["tasks"] == 3


def test_an_urgent_computation_waits_for_one_of_low_priority_at_most(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"busy": loop()})
    config = "[models.busy]\nthreads = 1\n"
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        Client(daemon.socket) as client,
        RawClient(daemon.socket) as raw,
    ):
        contexts = [raw.context("busy") for _ in range(8)]

        def begin(context: int, times: int, priority: str) -> int:
            inputs = [[name, message_of(tensor)] for name, tensor in looped(times).items()]
            params = {"context": context, "inputs": inputs, "priority": priority}
            return raw.start_request("compute", **params)

        for _ in range(3):
            running = begin(contexts[0], FOREVER, "low")
            while counts_of(client, "busy") != (1, 0):
                pass
            low = [begin(context, 2, "low") for context in contexts[1:-1]]
            urgent = begin(contexts[-1], 2, "urgent")
            while counts_of(client, "busy") != (1, len(low) + 1):
                pass
            assert raw.call("cancel", request=running)["cancelled"]
            with pytest.raises(Cancelled):
                raw.wait_result(running)
            assert raw.wait_result(urgent)["outputs"]
            assert not any(raw.has_answer(number) for number in low), "the urgent one came first"
            for number in low:
                assert raw.wait_result(number)["outputs"]


def message_of(tensor: Tensor) -> dict[str, Any]:
    return {"data": tensor.data, "dimensions": tensor.dimensions, "type": tensor.type}


def test_metrics_of_graphs_are_counted(daemon: RunningDaemon, client: Client) -> None:
    context = context_on(client, "counted")
    for _ in range(3):
        client.compute(context, {"a": floats(1, 2), "b": floats(0, 0)})
    with pytest.raises(InferdError):
        two, three = (floats(*[0] * 2 * rows, dimensions=[rows, 2]) for rows in (2, 3))
        client.compute(context, {"a": two, "b": three})

    def counted() -> dict[str, float]:
        found = client.stats()["metrics"]["computations"]
        return {s["outcome"]: s["value"] for s in found if s["model_name"] == "counted"}

    while counted() != {"ok": 3, "failed": 1}:
        pass
    lines = run_inferd("stats", socket=daemon.socket).stdout.splitlines()
    [head] = [number for number, line in enumerate(lines) if line.startswith("GRAPH ")]
    assert lines[head].split()[:3] == ["GRAPH", "INPUTS", "FAILED"]
    [row] = [line.split() for line in lines[head : lines.index("", head)] if "counted" in line]
    assert row[:4] == ["counted", "3", "1", "1.0"]


def test_a_graph_whose_probe_crashes_is_loaded_without_batches(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"crash": crashes_on_any_input()})
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        client.load("crash")
        reason = "its last load has crashed, and this one had no probe"
        assert state_of(client, "crash")["info"]["no_batches"] == reason


def test_a_graph_that_an_input_has_crashed_is_probed_again(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"crash": shifted_division()})
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        context = context_on(client, "crash")
        assert state_of(client, "crash")["info"]["batch_max"] == 32
        pid = state_of(client, "crash")["pid"]
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            client.compute(context, {"a": integers(-(2**31)), "b": integers(2)})
        outputs = client.compute(context, {"a": integers(12), "b": integers(7)}).outputs
        assert outputs[0][1].data == integers(15).data
        assert state_of(client, "crash")["pid"] != pid
        assert state_of(client, "crash")["info"]["batch_max"] == 32


def shifted_division() -> bytes:
    """Return a graph that adds `a` / (`b` - 3) to `a`. In a probe it divides by -3 and -2."""
    from onnx import TensorProto, helper

    return graph(
        [
            helper.make_node("Sub", ["b", "three"], ["c"]),
            helper.make_node("Div", ["a", "c"], ["d"]),
            helper.make_node("Add", ["a", "d"], ["y"]),
        ],
        [("a", "i32", ["n"]), ("b", "i32", ["n"])],
        [("y", "i32", ["n"])],
        [helper.make_tensor("three", TensorProto.INT32, [1], [3])],
    )


def crashes_on_any_input() -> bytes:
    """Return a graph whose division ends the process of ONNX Runtime, whatever its input is."""
    from onnx import TensorProto, helper

    least = helper.make_tensor("least", TensorProto.INT32, [1], [-(2**31)])
    return graph(
        [
            helper.make_node("Mul", ["x", "none"], ["zero"]),
            helper.make_node("Sub", ["zero", "one"], ["minus"]),
            helper.make_node("Add", ["zero", "least"], ["number"]),
            helper.make_node("Div", ["number", "minus"], ["y"]),
        ],
        [("x", "i32", ["n"])],
        [("y", "i32", ["n"])],
        [
            least,
            helper.make_tensor("none", TensorProto.INT32, [1], [0]),
            helper.make_tensor("one", TensorProto.INT32, [1], [1]),
        ],
    )


def test_magika_has_the_results_of_the_engine_in_one_process(client: Client) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        str(magika_file()), options, providers=["CPUExecutionProvider"]
    )
    context = context_on(client, "magika")
    rng = random.Random(1)
    for count in (1, 3):
        data = np.array([[rng.randrange(257) for _ in range(2048)] for _ in range(count)], np.int32)
        tensor = Tensor(data=data.tobytes(), dimensions=[count, 2048], type="i32")
        [(_, output)] = client.compute(context, {"bytes": tensor}).outputs
        [expected] = session.run(None, {"bytes": data})
        assert (output.data, output.dimensions) == (expected.tobytes(), list(expected.shape))


def test_inputs_that_end_the_process_are_refused_and_others_are_computed(client: Client) -> None:
    deadly = {"a": integers(-(2**31)), "b": integers(-1)}
    context, pid = context_on(client, "division"), state_of(client, "division")["pid"]
    other = context_on(client, "affine")
    affine_pid = state_of(client, "affine")["pid"]
    for _ in range(2):  # the second time without a process
        with pytest.raises(WorkerCrashed, match="this input crashes") as caught:
            client.compute(context, deadly)
        assert not caught.value.retryable
    outputs = client.compute(context, {"a": integers(7), "b": integers(2)}).outputs
    assert outputs[0][1].data == integers(3).data
    assert state_of(client, "division")["pid"] not in (0, pid)
    assert client.compute(other, {"a": floats(1, 2), "b": floats(0, 0)}).outputs
    assert state_of(client, "affine")["pid"] == affine_pid


def test_a_computation_that_waited_in_a_process_that_crashed_is_repeated(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"crash": _slow_division()})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        contexts = [raw.context("crash") for _ in range(3)]
        numbers = [
            raw.start_request("compute", context=context, inputs=_slow_inputs(*values))
            for context, values in zip(contexts, ((-(2**31), -1), (8, 2), (9, 3)), strict=True)
        ]
        with pytest.raises(WorkerCrashed, match="this input crashes"):
            raw.wait_result(numbers[0])
        for number, expected in zip(numbers[1:], (4, 3), strict=True):
            outputs = dict(raw.wait_result(number)["outputs"])
            assert outputs["y"]["data"] == integers(expected).data


def test_of_inputs_under_way_in_a_crash_only_the_guilty_one_is_refused(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"crash": _slow_division()})
    config = "[daemon]\ncores = 4\n"
    divisors = (2, -1, 3, 4, 5, 6)  # the second one ends the process
    with (
        running_daemon(config, models_dir=tmp_path) as daemon,
        RawClient(daemon.socket) as raw,
    ):
        contexts = [raw.context("crash") for _ in divisors]
        numbers = [
            raw.start_request("compute", context=context, inputs=_slow_inputs(-(2**31), divisor))
            for context, divisor in zip(contexts, divisors, strict=True)
        ]
        for number, divisor in zip(numbers, divisors, strict=True):
            if divisor == -1:
                with pytest.raises(WorkerCrashed, match="this input crashes"):
                    raw.wait_result(number)
            else:
                outputs = dict(raw.wait_result(number)["outputs"])
                assert outputs["y"]["data"] == integers(int(-(2**31) / divisor)).data
        # The innocent inputs may be sent again.
        again = raw.call("compute", context=contexts[0], inputs=_slow_inputs(-(2**31), 2))
        assert dict(again["outputs"])["y"]["data"] == integers(-(2**30)).data


def _slow_division() -> bytes:
    """Return a graph that divides after some milliseconds, in which further requests arrive."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, kind: int, shape: list[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), helper.make_node("Identity", ["v"], ["v2"])],
        "body",
        [
            value("i", TensorProto.INT64, []),
            value("c", TensorProto.BOOL, []),
            value("v", TensorProto.INT32, ["n"]),
        ],
        [value("c2", TensorProto.BOOL, []), value("v2", TensorProto.INT32, ["n"])],
    )
    return graph(
        [
            helper.make_node("Loop", ["times", "true", "a"], ["later"], body=body),
            helper.make_node("Div", ["later", "b"], ["y"]),
        ],
        [("a", "i32", ["n"]), ("b", "i32", ["n"]), ("times", "i64", [])],
        [("y", "i32", ["n"])],
        [helper.make_tensor("true", TensorProto.BOOL, [], [True])],
    )


def _slow_inputs(a: int, b: int) -> list[list[Any]]:
    def message(tensor: Tensor) -> dict[str, Any]:
        return {"data": tensor.data, "dimensions": tensor.dimensions, "type": tensor.type}

    times = Tensor(data=struct.pack("q", 100_000), dimensions=[1], type="i64")
    named = (("a", integers(a)), ("b", integers(b)), ("times", times))
    return [[name, message(tensor)] for name, tensor in named]


def test_a_cancelled_computation_ends_and_its_process_stays(client: Client) -> None:
    with pytest.raises(Timeout):
        client.compute(context_on(client, "loop"), looped(FOREVER), timeout=0.2)
    pid = state_of(client, "loop")["pid"]
    assert client.compute(context_on(client, "loop"), looped(3)).outputs
    assert state_of(client, "loop")["pid"] == pid


def test_a_computation_that_never_ends_is_killed_and_refused(client: Client) -> None:
    context = context_on(client, "loop")
    pid = state_of(client, "loop")["pid"]
    with pytest.raises(WorkerCrashed, match="this input crashes"):
        client.compute(context, looped(FOREVER))
    assert client.compute(context, looped(3)).outputs
    assert state_of(client, "loop")["pid"] != pid


def test_a_computation_past_the_limit_on_memory_fails_and_its_process_stays(
    client: Client,
) -> None:
    context = context_on(client, "allocation")
    pid = state_of(client, "allocation")["pid"]

    def numbers(count: int) -> dict[str, Tensor]:
        return {"n": Tensor(data=struct.pack("q", count), dimensions=[1], type="i64")}

    with pytest.raises(OutOfMemory, match="too little memory for the computation"):
        client.compute(context, numbers(1 << 33))
    assert client.compute(context, numbers(1 << 10)).outputs[0][1].data == bytes(4)
    assert state_of(client, "allocation")["pid"] == pid


def test_callers_get_the_outputs_of_their_own_inputs(daemon: RunningDaemon) -> None:
    failures: list[str] = []

    def call(number: int) -> None:
        with Client(daemon.socket) as client:
            context = context_on(client, "affine")
            for n in range(60):
                value = float(1000 * number + n)
                size = 1 + (number + n) % 3
                a, b = (floats(*[v] * 2 * size, dimensions=[size, 2]) for v in (value, 0.5))
                output = client.compute(context, {"a": a, "b": b}).outputs[0][1]
                if output.data != floats(*[2 * value + 0.5] * 2 * size).data:
                    failures.append(f"{number}: {n}")

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_users_get_the_outputs_of_their_own_inputs(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine()})
    config = f"[models.shared]\nfile = {json.dumps(str(tmp_path / 'affine.onnx'))}\n"
    with daemon_for_all(config) as daemon, client_of(daemon, ADA) as a, client_of(daemon, BOB) as b:
        users = [(one, one.context("shared"), mark) for one, mark in ((a, 0x11), (b, 0x22))]
        for size in (1, 5, 2, 3):
            requests = []
            for raw, context, mark in users:
                tensor = {"data": bytes([mark]) * 8 * size, "dimensions": [size, 2], "type": 1}
                zeros = {**tensor, "data": bytes(8 * size)}
                inputs = [["a", tensor], ["b", zeros]]
                requests.append(raw.start_request("compute", context=context, inputs=inputs))
            for (raw, _, mark), number in zip(users, requests, strict=True):
                [(_, output)] = raw.wait_result(number)["outputs"]
                [value] = struct.unpack("f", bytes([mark]) * 4)
                assert output["data"] == struct.pack("f", 2 * value) * 2 * size
                assert output["dimensions"] == [size, 2]


def test_damaged_files_are_typed_errors_and_disturb_no_other_graph(tmp_path: Path) -> None:
    rng, data = random.Random(7), classifier()
    mutants = {f"mutant{n}": damaged(data, n, rng) for n in range(DAMAGED_FILES)}
    write_graphs(tmp_path, {"whole": affine(), **mutants})
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        check_damaged_files(client, [*mutants])


def classifier() -> bytes:
    """Return a graph with several operators and some weights."""
    from onnx import TensorProto, helper

    weights = helper.make_tensor("w", TensorProto.FLOAT, [8, 4], bytes(range(128)), True)
    return graph(
        [
            helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
            helper.make_node("MatMul", ["f", "w"], ["m"]),
            helper.make_node("Relu", ["m"], ["r"]),
            helper.make_node("Softmax", ["r"], ["y"], axis=-1),
        ],
        [("x", "u8", ["n", 8])],
        [("y", "fp32", ["n", 4])],
        [weights],
    )


def test_graphs_and_language_models_share_a_daemon(client: Client) -> None:
    session = client.init_execution_context(client.load("echo"))
    assert client.compute(context_on(client, "affine"), {"a": floats(1, 2), "b": floats(0, 0)})
    assert client.prompt_compute(session, "hi") == "hi"

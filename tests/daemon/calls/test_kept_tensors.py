"""Outputs of graphs that stay in the daemon: as next inputs, their owners, bounds and ends."""

from __future__ import annotations

import json
import os
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnxruntime
import pytest

from inferd import (
    AsyncClient,
    Client,
    InvalidArgument,
    KeptTensor,
    NotFound,
    QuotaExceeded,
    Timeout,
    WorkerCrashed,
)
from inferd.backends.errors import InferdError
from inferd.cli.monitoring.stats import MetricSums
from inferd.ipc.messages import FREED_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd as command
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.onnx_graphs import affine, division, identity, loop, write_graphs
from tests.raw import RawClient
from tools.get_graphs import MISSING, silero_vad

KEPT_MAX = 8
BYTES_MAX = 1 << 20
FOREVER = 1 << 62
ONE = {"data": struct.pack("2f", 1, 2), "dimensions": [1, 2], "type": "fp32"}
INPUTS: list[Any] = [["a", ONE], ["b", ONE]]


def silero_file() -> Path:
    folder = silero_vad()
    assert folder is not None, MISSING
    return folder / "silero_vad.onnx"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    graphs = {"affine": affine(), "loop": loop(), "division": division()}
    write_graphs(models, {**graphs, "copy": identity("fp32"), "other": affine()})
    config = f"""
[daemon]
cores = 2
kept-tensors-user-max = {KEPT_MAX}
kept-tensor-bytes-user-max = {BYTES_MAX}
worker-hang-timeout-s = 60
[models.silero]
file = {json.dumps(str(silero_file()))}
threads = 1
"""
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.fixture
def raw(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as connected:
        yield connected
        connected.call("deinit_backend")  # before the next test counts


def kept_in(result: dict[str, Any], name: str = "y") -> int:
    """Return the handle of an output that has stayed."""
    tensor = dict(map(tuple, result["outputs"]))[name]
    assert "data" not in tensor, "it is not sent"
    return int(tensor["kept"])


def sound(frames: int) -> np.ndarray[Any, Any]:
    """Return frames of a sound that changes, each with the end of the previous one."""
    generator = np.random.default_rng(5)
    time = np.arange(64 + 512 * frames) / 16000
    wave = 0.3 * np.sin(2 * np.pi * (200 + 300 * time) * time) * (time % 0.3 > 0.1)
    samples = (wave + generator.normal(0, 0.01, len(time))).astype(np.float32)
    return np.stack([samples[512 * n : 512 * n + 576] for n in range(frames)])


def speech_in_process(frames: np.ndarray[Any, Any]) -> list[float]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(silero_file()), options)
    state, found = np.zeros((2, 1, 128), np.float32), []
    for frame in frames:
        inputs = {"input": frame[None], "state": state, "sr": np.array(16000)}
        output, state = session.run(["output", "stateN"], inputs)
        found.append(float(output[0, 0]))
    return found


def test_the_state_of_speech_detection_stays_in_the_daemon(client: Client) -> None:
    frames, found = sound(60), []
    with client.graph("silero") as graph:
        state: Any = np.zeros((2, 1, 128), np.float32)
        for number, frame in enumerate(frames):
            inputs = {"input": frame[None], "state": state, "sr": 16000}
            outputs = graph.run(inputs, keep=["stateN"])
            state = outputs["stateN"]
            assert isinstance(state, KeptTensor)
            assert (state.shape, state.type) == ((2, 1, 128), "fp32")
            found.append(float(outputs["output"][0, 0]))
            if number == 30:  # the state is not in the process that computes
                os.kill(client.show("silero")["pid"], signal.SIGKILL)
    expected = speech_in_process(frames)
    assert max(expected) - min(expected) > 0.001, "the state has an effect"
    assert np.allclose(found, expected, rtol=0, atol=1e-6)


def test_a_kept_tensor_is_a_value_that_several_runs_may_use(client: Client) -> None:
    with client.graph("affine") as graph:
        first = graph.run({"a": [[1, 2]], "b": [[0, 0]]}, keep=["y"])["y"]
        for _ in range(2):
            assert graph.run({"a": first, "b": [[1, 1]]})["y"].tolist() == [[5, 9]]
        assert graph.run({"a": first, "b": first})["y"].tolist() == [[6, 12]]
        assert graph.run({"0": first, "1": [[0, 0]]})["y"].tolist() == [[4, 8]]
        found = graph.run_tensors({"a": first, "b": first}, keep=["y"])["y"]
        assert (found.kept > 0, found.data, found.dimensions) == (True, b"", [1, 2])
        graph.free(found, first)
        with pytest.raises(NotFound, match="there is no kept tensor"):
            graph.run({"a": first, "b": [[1, 1]]})


def test_a_kept_tensor_keeps_its_type_under_the_name_of_an_input(daemon: RunningDaemon) -> None:
    """The output is spelled by its own type, since a kept input has none in the call."""
    with Client(daemon.socket) as client, client.graph("copy") as graph:
        kept = graph.run({"x0": [1.5, 2]}, keep=["y0"])["y0"]
        tensor = graph.run_tensors({"x0": kept})["y0"]
        assert (tensor.type, tensor.dimensions) == (1, [2])


def test_tensors_without_references_are_freed_by_later_runs(client: Client) -> None:
    with client.graph("affine") as graph:
        state: Any = [[1, 0]]
        for _ in range(4 * KEPT_MAX):
            state = graph.run({"a": state, "b": [[-1, 0]]}, keep=["y"])["y"]
        assert graph.run({"a": state, "b": [[0, 0]]})["y"].tolist() == [[2, 0]]


def test_set_input_takes_a_kept_tensor(raw: RawClient) -> None:
    context = raw.context("affine")
    kept = kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
    for index in (0, 1):
        raw.call("set_input", context=context, index=index, tensor={"kept": kept})
    raw.call("free_tensors", tensors=[kept])
    raw.call("compute", context=context)
    data = raw.call("get_output", context=context, index=0)["data"]
    assert struct.unpack("2f", data) == (9, 18)


def test_joined_callers_get_the_outputs_of_their_own_states(daemon: RunningDaemon) -> None:
    failures: list[Any] = []

    def call(number: int) -> None:
        with Client(daemon.socket) as client, client.graph("affine") as graph:
            state: Any = [[number, 1]]
            expected = np.array([[number, 1]], np.float32)
            for n in range(40):
                bias = np.array([[-number, n]], np.float32)
                state = graph.run({"a": state, "b": bias}, keep=["y"])["y"]
                expected = 2 * expected + bias
                if n % 10 == 9:  # the numbers stay exact
                    zero = np.zeros((1, 2), np.float32)
                    value = graph.run({"a": state, "b": zero})["y"] / 2
                    if not np.array_equal(value, expected):
                        failures.append((number, n, value, expected))
                    state, expected = [[number, 1]], np.array([[number, 1]], np.float32)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# Owners and ends.


def refusal(raw: RawClient, call: str, **params: Any) -> InferdError:
    with pytest.raises(InferdError) as caught:
        raw.call(call, **params)
    assert caught.value.hint
    return caught.value


def test_a_tensor_is_not_there_for_another_connection(
    daemon: RunningDaemon, raw: RawClient
) -> None:
    context = raw.context("affine")
    kept = kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
    inputs = [["a", {"kept": kept}], ["b", ONE]]
    with RawClient(daemon.socket) as other:
        params = {"context": other.context("affine"), "inputs": inputs}
        assert refusal(other, "compute", **params).name == "NotFound"
        other.call("free_tensors", tensors=[kept])
    assert raw.call("compute", context=context, inputs=inputs)["outputs"]


def test_a_tensor_is_not_there_for_another_user(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine()})
    config = f"[models.shared]\nfile = {json.dumps(str(tmp_path / 'affine.onnx'))}\n"
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        hers, his = ada.context("shared"), bob.context("shared")
        kept = kept_in(ada.call("compute", context=hers, inputs=INPUTS, keep=["y"]))
        inputs = [["a", {"kept": kept}], ["b", ONE]]
        refused = refusal(bob, "compute", context=his, inputs=inputs)
        absent = [["a", {"kept": kept + 1000}], ["b", ONE]]
        nobodys = refusal(bob, "compute", context=his, inputs=absent)
        assert refused.name == nobodys.name == "NotFound"
        assert refused.message.replace(str(kept), "N") == nobodys.message.replace(
            str(kept + 1000), "N"
        )
        bob.call("free_tensors", tensors=[kept])
        tensor = {"kept": kept}
        assert refusal(bob, "set_input", context=his, index=0, tensor=tensor).name == "NotFound"
        assert ada.call("compute", context=hers, inputs=inputs)["outputs"]


@pytest.mark.parametrize("end", ["free", "free_tensors", "unload", "deinit_backend"])
def test_a_tensor_ends_with_its_graph_or_on_request(raw: RawClient, end: str) -> None:
    graph = raw.call("load_by_name", name="affine")["graph"]
    context = raw.call("init_execution_context", graph=graph)["context"]
    kept = kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
    if end == "free":
        raw.call("compute", context=context, inputs=INPUTS, free=[kept, kept, 7])
    elif end == "free_tensors":
        raw.call(end, tensors=[kept, kept, 7])
    elif end == "unload":
        raw.call(end, graph=graph, keep=True)
    else:
        raw.call(end)
    inputs = [["a", {"kept": kept}], ["b", ONE]]
    refused = refusal(raw, "compute", context=raw.context("affine"), inputs=inputs)
    assert refused.name == "NotFound" and refused.data == {"kept": kept}


def keep_once_there_is_space(raw: RawClient, context: int) -> None:
    """Keep a tensor, once the daemon has noticed the end of the last connection."""
    while True:
        try:
            kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
        except QuotaExceeded:
            continue
        return


def test_the_bounds_count_no_tensors_of_ended_connections(daemon: RunningDaemon) -> None:
    for _ in range(3):
        with RawClient(daemon.socket) as raw:
            context = raw.context("affine")
            keep_once_there_is_space(raw, context)
            for _ in range(KEPT_MAX - 1):
                kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
            refused = refusal(raw, "compute", context=context, inputs=INPUTS, keep=["y"])
            assert isinstance(refused, QuotaExceeded)
            assert refused.data == {
                "bound": "kept-tensors-user-max",
                "tensors": KEPT_MAX,
                "tensors_max": KEPT_MAX,
            }


def test_their_bytes_are_bounded(raw: RawClient) -> None:
    context = raw.context("copy")
    data = bytes(400_000)
    inputs = [["x0", {"data": data, "dimensions": [100_000], "type": "fp32"}]]
    kept = [
        kept_in(raw.call("compute", context=context, inputs=inputs, keep=["y0"]), "y0")
        for _ in range(2)
    ]
    refused = refusal(raw, "compute", context=context, inputs=inputs, keep=["y0"])
    assert isinstance(refused, QuotaExceeded)
    assert refused.data["bound"] == "kept-tensor-bytes-user-max"
    assert 800_000 < refused.data["bytes"] < 810_000 and refused.data["bytes_max"] == BYTES_MAX
    raw.call("free_tensors", tensors=kept[:1])
    assert kept_in(raw.call("compute", context=context, inputs=inputs, keep=["y0"]), "y0")


def test_another_graph_refuses_a_tensor(raw: RawClient) -> None:
    kept = kept_in(raw.call("compute", context=raw.context("affine"), inputs=INPUTS, keep=["y"]))
    inputs = [["a", {"kept": kept}], ["b", ONE]]
    for model in ("other", "echo"):
        context = raw.context(model)
        for params in ({"inputs": inputs}, {"index": 0, "tensor": {"kept": kept}}):
            call = "compute" if "inputs" in params else "set_input"
            refused = refusal(raw, call, context=context, **params)
            assert isinstance(refused, InvalidArgument) and "'affine'" in refused.message


def test_a_swap_loses_the_tensors_of_the_old_file(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine(), "next": affine(3)})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        context = raw.context("affine")
        kept = kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
        inputs = [["a", {"kept": kept}], ["b", ONE]]
        assert raw.call("compute", context=context, inputs=inputs)["outputs"]
        raw.call("swap", name="affine", to="next")
        tensor = {"kept": kept}
        for refused in (
            refusal(raw, "compute", context=context, inputs=inputs),
            refusal(raw, "set_input", context=context, index=0, tensor=tensor),
        ):
            assert isinstance(refused, NotFound) and "was lost" in refused.message
            assert refused.data == {"kept": kept, "cause": "swap"}
        again = kept_in(raw.call("compute", context=context, inputs=INPUTS, keep=["y"]))
        inputs = [["a", {"kept": again}], ["b", ONE]]
        [[_, output]] = raw.call("compute", context=context, inputs=inputs)["outputs"]
        assert struct.unpack("2f", output["data"]) == (13, 26)


def test_an_input_that_ends_the_process_leaves_the_kept_ones(client: Client) -> None:
    with client.graph("division") as graph:
        kept = graph.run({"a": [-(2**31)], "b": [1]}, keep=["y"])["y"]
        with pytest.raises(WorkerCrashed):
            graph.run({"a": kept, "b": [-1]})
        assert graph.run({"a": kept, "b": [2]})["y"].tolist() == [-(2**30)]
        with pytest.raises(WorkerCrashed, match="crash"):
            graph.run({"a": kept, "b": [-1]})


def test_a_call_that_is_computed_again_still_has_inputs_that_were_freed(
    raw: RawClient, client: Client
) -> None:
    context, x = raw.context("loop"), {"data": struct.pack("f", 5), "dimensions": [1]}
    once = {"data": struct.pack("q", 1), "dimensions": [1], "type": "i64"}
    inputs = [["x", x | {"type": "fp32"}], ["times", once]]
    kept = kept_in(raw.call("compute", context=context, inputs=inputs, keep=["y"]))
    buffer = raw.call("register_buffer", size=8)["buffer"]
    raw.call("write_buffer", buffer=buffer, offset=0, data=struct.pack("q", FOREVER))
    times = {"buffer": buffer, "length": 8, "dimensions": [], "type": "i64"}
    inputs = [["x", {"kept": kept}], ["times", times]]
    number = raw.start_request("compute", context=context, inputs=inputs)
    while not client.stats()["models"]["loop"]["computations_running"]:
        pass
    raw.call("free_tensors", tensors=[kept])
    raw.call("write_buffer", buffer=buffer, offset=0, data=struct.pack("q", 2))
    os.kill(client.show("loop")["pid"], signal.SIGKILL)
    [[_, output]] = raw.wait_result(number)["outputs"]
    assert struct.unpack("f", output["data"]) == (5,)
    with pytest.raises(NotFound):
        raw.call("compute", context=context, inputs=inputs)


@pytest.mark.anyio
async def test_a_cancelled_run_keeps_nothing(daemon: RunningDaemon) -> None:
    endless: dict[str, Any] = {"x": [1.0], "times": FOREVER}
    async with AsyncClient(daemon.socket) as client, client.graph("loop") as graph:
        for _ in range(2):
            with pytest.raises(Timeout):
                await graph.run(endless, keep=["y"], timeout=0.2)
            with anyio.move_on_after(0.2):
                await graph.run(endless, keep=["y"])
        few: dict[str, Any] = {"x": [1.0], "times": 2}
        kept = [(await graph.run(few, keep=["y"]))["y"] for _ in range(KEPT_MAX)]
        with pytest.raises(QuotaExceeded):
            await graph.run(few, keep=["y"])
        await graph.free(*kept[:2])
        again = await graph.run({"x": kept[2], "times": 2}, keep=["y"])
        assert (await graph.run({"x": again["y"], "times": 1}))["y"].tolist() == [1]


def test_a_client_that_reconnects_has_lost_its_tensors(daemon: RunningDaemon) -> None:
    with Client(daemon.socket, reconnect=True) as client, client.graph("affine") as graph:
        kept = graph.run({"a": [[1, 2]], "b": [[0, 0]]}, keep=["y"])["y"]
        connection = client._asynchronous._open_connection
        connection.close()
        with pytest.raises(NotFound, match="no kept tensor") as caught:
            graph.run({"a": kept, "b": [[0, 0]]})
        assert "begin again" in caught.value.hint


# Mistakes.


def test_only_named_outputs_of_graphs_stay(raw: RawClient, client: Client) -> None:
    context = raw.context("affine")
    refused = refusal(raw, "compute", context=context, inputs=INPUTS, keep=["z"])
    assert refused.hint == "its outputs are 'y'"
    assert refusal(raw, "compute", context=context, keep=["y"]).name == "InvalidArgument"
    echo: list[Any] = [["x", {"data": b"1234", "dimensions": [1], "type": "i32"}]]
    params = {"context": raw.context("echo"), "inputs": echo, "keep": ["x"]}
    assert "only a graph's outputs" in refusal(raw, "compute", **params).message
    with pytest.raises(InvalidArgument, match="only while the graph is open"):
        client.graph("affine").run({"a": [[1, 2]], "b": [[0, 0]]}, keep=["y"])


def test_no_call_frees_more_than_the_limit(raw: RawClient, client: Client) -> None:
    assert raw.call("free_tensors", tensors=list(range(FREED_MAX))) == {}
    too_many = list(range(FREED_MAX + 1))
    assert refusal(raw, "free_tensors", tensors=too_many).name == "InvalidArgument"
    params = {"context": raw.context("affine"), "inputs": INPUTS, "free": too_many}
    assert refusal(raw, "compute", **params).name == "InvalidArgument"
    client.free_tensors(range(1, 2 * FREED_MAX + 9))


def test_kept_inputs_count_among_the_bytes_of_requests(tmp_path: Path) -> None:
    """A call that names a large tensor many times does not make the daemon copy all of them."""
    write_graphs(tmp_path, {"copies": identity(*["fp32"] * 20)})
    with running_daemon(models_dir=tmp_path) as daemon, RawClient(daemon.socket) as raw:
        context = raw.context("copies")
        small = {"data": bytes(4), "dimensions": [1], "type": "fp32"}
        large = {"data": bytes(1_000_000), "dimensions": [250_000], "type": "fp32"}
        given: dict[str, Any] = {f"x{number}": small for number in range(20)}
        inputs = [[name, tensor] for name, tensor in (given | {"x0": large}).items()]
        kept = kept_in(raw.call("compute", context=context, inputs=inputs, keep=["y0"]), "y0")
        for times, fits in ((2, True), (128, False)):
            names = [f"x{number}" for number in range(times)]
            inputs = [[name, tensor] for name, tensor in given.items() if name not in names]
            inputs += [[name, {"kept": kept}] for name in names]
            params = {"context": context, "inputs": inputs, "keep": ["y0", "y1"]}
            if fits:
                assert kept_in(raw.call("compute", **params), "y1")
            else:
                refused = refusal(raw, "compute", **params)
                assert refused.name == "Busy"
                assert refused.data["bound"] == "request-bytes-user-max"


def test_the_tensors_of_all_users_have_a_bound(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"affine": affine()})
    config = f"""kept-tensor-bytes-max = 2000
[models.shared]
file = {json.dumps(str(tmp_path / "affine.onnx"))}
"""
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        hers, his = ada.context("shared"), bob.context("shared")
        for _ in range(3):
            kept = kept_in(ada.call("compute", context=hers, inputs=INPUTS, keep=["y"]))
        refused = refusal(bob, "compute", context=his, inputs=INPUTS, keep=["y"])
        assert refused.name == "Busy" and refused.retryable
        assert refused.data["bound"] == "kept-tensor-bytes-max"
        ada.call("free_tensors", tensors=[kept])
        assert kept_in(bob.call("compute", context=his, inputs=INPUTS, keep=["y"]))


def test_a_tensor_that_does_not_fit_an_input_is_refused(client: Client) -> None:
    with client.graph("loop") as graph:
        kept = graph.run({"x": [1.0], "times": 1}, keep=["y"])["y"]
        with pytest.raises(InvalidArgument, match="got a tensor of fp32"):
            graph.run({"x": kept, "times": kept})


def test_metrics_have_the_tensors_and_buffers_that_clients_hold(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"copy": identity("fp32"), "other": affine()})
    with (
        running_daemon("[daemon]\nbuffer-bytes-max = 1048576\n", models_dir=tmp_path) as daemon,
        Client(daemon.socket) as client,
        client.graph("copy") as graph,
        client.graph("other"),
    ):

        def held(family: str) -> dict[str, float]:
            return MetricSums(client.stats()).by(family, "model_name")

        assert held("kept_tensors") == {"copy": 0, "other": 0}
        kept = [graph.run({"x0": [1.0, 2.0]}, keep=["y0"])["y0"] for _ in range(2)]
        assert held("kept_tensors") == {"copy": 2, "other": 0}
        assert held("kept_tensor_bytes")["copy"] >= 2 * 8
        buffer = client.buffer(4096)
        sums = MetricSums(client.stats())
        assert (sums.total("buffers"), sums.total("buffer_bytes")) == (1, 4096)
        assert sums.total("buffer_bytes_max") == 1 << 20
        assert sums.total("kept_tensor_bytes_max") > 0
        text = command("stats", socket=daemon.socket).stdout.split()
        assert " ".join(text).find("kept of copy 2 ") > 0 and "buffers" in text
        graph.free(*kept)
        client.free_buffers([buffer])
        assert held("kept_tensors") == {"copy": 0, "other": 0} == held("kept_tensor_bytes")
        assert MetricSums(client.stats()).total("buffer_bytes") == 0
        assert "kept of" not in command("stats", socket=daemon.socket).stdout

"""Tensors of any size over a fleet: buffers of clients, whose parts pass through the entry."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from inferd import Client, NotFound, WorkerCrashed
from inferd.backends.errors import (
    Cancelled,
    InferdError,
    InvalidArgument,
    QuotaExceeded,
    Timeout,
    TooLarge,
)
from inferd.backends.shared_memory import new_shared_memory
from inferd.cli.monitoring.stats import MetricSums
from inferd.gateways.fleet.link import PART_BYTES
from inferd.ipc.messages import BUFFER_PART_BYTES_MAX, TENSOR_BYTES_MAX
from tests.daemon.metrics.scraping import ScrapedMetrics, scrape
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.gateways.http.driver import CALL_S_MAX, gateway
from tests.onnx_graphs import affine, identity, loop, write_graphs
from tests.raw import RawClient
from tests.waiting import wait_until

LARGE = 64 << 20
USER_BYTES, BUFFERS_MAX = 3 * LARGE, 4
MORE = f"buffers-user-max = {BUFFERS_MAX}\nbuffer-bytes-user-max = {USER_BYTES}\n"
FOREVER = 1 << 62


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("graphs")
    graphs = {"copy": identity("fp32"), "two": identity("fp32", "fp32"), "loop": loop()}
    write_graphs(folder, {**graphs, "affine": affine()})
    return "".join(
        f"[models.{name}]\nfile = {json.dumps(str(folder / f'{name}.onnx'))}\n"
        for name in (*graphs, "affine")
    )


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, config: str) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), config, "a", "b", more=MORE) as running:
        running.until_noted("the metrics of the fleet are at")
        yield running


@pytest.fixture
def raw(fleet: RunningFleet) -> Iterator[RawClient]:
    with RawClient(fleet.socket) as connected:
        yield connected
    until_freed(fleet)


def until_freed(fleet: RunningFleet) -> None:
    """Wait until neither the entry nor a node has a buffer."""
    wait_until(lambda: not buffers_of_entry(fleet))
    wait_until(lambda: not any("inferd-buffer" in name for name in open_files(fleet.entry.pid)))
    for daemon in fleet.daemons.values():
        until_freed_by(daemon.socket)


def until_freed_by(socket: str) -> None:
    """Wait until a node has no buffer."""
    wait_until(lambda: not sums_of(socket).total("buffers"))


def buffers_of_entry(fleet: RunningFleet) -> int:
    return int(ScrapedMetrics(scrape(fleet.metrics))("fleet_buffers"))


def open_files(pid: int) -> list[str]:
    found = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(file))
        except FileNotFoundError:  # it was closed meanwhile
            continue
    return found


def sums_of(socket: str) -> MetricSums:
    with Client(socket) as client:
        return MetricSums(client.stats())


def computing(fleet: RunningFleet) -> str | None:
    """Return the node that computes the loop."""
    for name, daemon in fleet.daemons.items():
        with Client(daemon.socket) as client:
            found = client.stats()["models"].get("loop")
        if found is not None and found["computations_running"]:
            return name
    return None


def shared(buffer: int, length: int, offset: int = 0) -> dict[str, Any]:
    tensor = {"buffer": buffer, "offset": offset, "length": length}
    return {**tensor, "dimensions": [length // 4], "type": "fp32"}


def begin_loop(raw: RawClient, **more: Any) -> int:
    """Start a computation on a buffer that does not end."""
    size = 3 * PART_BYTES + 64
    buffer = raw.call("register_buffer", size=size)["buffer"]
    times = {"data": FOREVER.to_bytes(8, "little"), "dimensions": [], "type": "i64"}
    inputs = [["x", shared(buffer, size)], ["times", times]]
    return raw.start_request("compute", context=raw.context("loop"), inputs=inputs, **more)


def refusal(raw: RawClient, call: str, **params: Any) -> InferdError:
    with pytest.raises(InferdError) as caught:
        raw.call(call, **params)
    assert caught.value.hint
    return caught.value


def test_64_mib_of_a_program_are_computed_on_a_node_and_written_to_their_place(
    fleet: RunningFleet,
) -> None:
    count = LARGE // 4
    with Client(fleet.socket) as client, client.graph("copy") as graph:
        buffer = client.buffer(2 * LARGE)
        given, place = buffer.view([count], "float32"), buffer.view([count], offset=LARGE)
        given.array[:] = np.arange(count, dtype=np.float32)
        for number in range(2):
            given.array[-1] = number
            found = graph.run({"x0": given}, out={"y0": place})["y0"]
            assert np.shares_memory(found, place.array)
            assert np.array_equal(found, given.array)
        assert buffers_of_entry(fleet) == 1
    until_freed(fleet)


def test_large_tensors_need_no_buffer_of_the_program(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client, client.graph("copy") as graph:
        for width in (2, 3, 5, 3):  # 8, 12, 20 and 12 MiB
            x = np.arange(width << 20, dtype=np.float32)
            np.testing.assert_array_equal(graph.run({"x0": x})["y0"], x)
            np.testing.assert_array_equal(graph.run({"x0": x[:9]})["y0"], x[:9])
    until_freed(fleet)


def test_the_gateway_of_a_fleet_computes_large_tensors(fleet: RunningFleet) -> None:
    x = np.arange(3 << 20, dtype=np.float32)  # 12 MiB
    with gateway(fleet) as running:
        client = triton.InferenceServerClient(running.address, network_timeout=CALL_S_MAX)
        given = triton.InferInput("x0", [len(x)], "FP32")
        given.set_data_from_numpy(x)
        result = client.infer("copy", [given], outputs=[triton.InferRequestedOutput("y0")])
        np.testing.assert_array_equal(result.as_numpy("y0"), x)
        client.close()
    until_freed(fleet)


def test_each_node_computes_large_tensors(fleet: RunningFleet) -> None:
    x = np.arange(3 << 20, dtype=np.float32)
    for node in fleet.daemons:
        with Client(fleet.socket) as operator, Client(fleet.socket) as client:
            before = sums_of(fleet.daemons[node].socket).by("computations", "model_name")
            for other in fleet.daemons:
                operator.drain(node=other, undo=other == node)
            with client.graph("copy") as graph:
                np.testing.assert_array_equal(graph.run({"x0": x})["y0"], x)
            after = sums_of(fleet.daemons[node].socket).by("computations", "model_name")
            assert after["copy"] > before.get("copy", 0)
    fleet.clear()


def test_a_buffer_is_written_and_read_in_parts_without_descriptors(raw: RawClient) -> None:
    size, part = 12 << 20, 1_000_000
    buffer = raw.call("register_buffer", size=2 * size)["buffer"]
    for begin in range(0, size, part):
        data = bytes([begin // part]) * min(part, size - begin)
        raw.call("write_buffer", buffer=buffer, offset=begin, data=data)
    params = {"inputs": [["x0", shared(buffer, size)]], "outputs": [["y0", buffer, size, size]]}
    [[name, output]] = raw.call("compute", context=raw.context("copy"), **params)["outputs"]
    assert name == "y0" and "data" not in output, "it is not sent"
    expected = {"buffer": buffer, "offset": size, "length": size, "dimensions": [size // 4]}
    assert output == expected | {"type": 1}
    for begin in range(0, size, part):
        wanted = min(part, size - begin)
        found = raw.call("read_buffer", buffer=buffer, offset=size + begin, size=wanted)
        assert found["data"] == bytes([begin // part]) * wanted


def test_inputs_in_a_frame_a_descriptor_and_a_buffer_are_one_request(raw: RawClient) -> None:
    memory = new_shared_memory(4 * PART_BYTES)
    numbers = np.arange(PART_BYTES, dtype=np.float32)
    os.pwrite(memory, numbers.tobytes(), 0)
    buffer = raw.call("register_buffer", [memory], fd=0)["buffer"]
    passed = os.memfd_create("passed")
    os.write(passed, numbers[::-1].tobytes())
    second = {"fd": 0, "dimensions": [len(numbers)], "type": "fp32"}
    inputs = [["x0", shared(buffer, numbers.nbytes)], ["x1", second]]
    places = [["y0", buffer, 0, numbers.nbytes]]
    context = raw.context("two")
    found = dict(
        raw.call("compute", [passed], context=context, inputs=inputs, outputs=places)["outputs"]
    )
    assert found["y0"]["buffer"] == buffer
    assert found["y1"]["data"] == numbers[::-1].tobytes()
    assert os.pread(memory, numbers.nbytes, 0) == numbers.tobytes()
    both = [inputs[0], ["x1", inputs[0][1]]]
    params: dict[str, Any] = {"context": context, "outputs": places}
    kept = raw.call("compute", inputs=both, keep=["y1"], **params)["outputs"]
    [handle] = [tensor["kept"] for name, tensor in kept if name == "y1"]
    raw.call(
        "compute", context=context, inputs=[inputs[0], ["x1", {"kept": handle}]], outputs=places
    )
    for descriptor in (memory, passed):
        os.close(descriptor)


def test_parts_that_are_not_in_a_buffer_are_refused(raw: RawClient, fleet: RunningFleet) -> None:
    buffer, context = raw.call("register_buffer", size=4096)["buffer"], raw.context("copy")
    wrong: list[tuple[list[Any], list[Any], str]] = [
        ([["x0", shared(buffer, 4096, 64)]], [], "InvalidArgument"),
        ([["x0", shared(buffer, 8, 4)]], [], "InvalidArgument"),
        ([["x0", shared(buffer + 1, 8)]], [], "NotFound"),
        ([["x0", shared(buffer, 8)]], [["y0", buffer, 64, 8192]], "InvalidArgument"),
        ([["x0", shared(buffer, 8)]], [["y0", buffer, 0, 8]] * 2, "InvalidArgument"),
        ([["x0", shared(buffer, 8)]], [["y0", buffer, 0, 4]], "TooLarge"),
        ([["x0", shared(buffer, 8)]], [["y9", buffer, 0, 8]], "InvalidArgument"),
    ]  # fmt: skip
    for inputs, outputs, name in wrong:
        found = refusal(raw, "compute", context=context, inputs=inputs, outputs=outputs)
        assert found.name == name, (inputs, outputs, found)
    size = BUFFER_PART_BYTES_MAX + 1
    assert isinstance(
        refusal(raw, "read_buffer", buffer=buffer, offset=0, size=4097), InvalidArgument
    )
    large = raw.call("register_buffer", size=size)["buffer"]
    assert isinstance(
        refusal(raw, "read_buffer", buffer=large, offset=0, size=size), InvalidArgument
    )
    with RawClient(fleet.socket) as other:
        for call, params in (("read_buffer", {"size": 1}), ("write_buffer", {"data": b"x"})):
            assert isinstance(refusal(other, call, buffer=buffer, offset=0, **params), NotFound)
        other.call("free_buffers", buffers=[buffer])  # not its own
    assert raw.call("read_buffer", buffer=buffer, offset=0, size=1)["data"] == b"\0"
    raw.call("free_buffers", buffers=[buffer, large])
    assert isinstance(refusal(raw, "read_buffer", buffer=buffer, offset=0, size=1), NotFound)


def test_a_users_buffers_are_bounded(raw: RawClient, fleet: RunningFleet) -> None:
    found = refusal(raw, "register_buffer", size=USER_BYTES + 1)
    assert isinstance(found, QuotaExceeded) and found.data["bound"] == "buffer-bytes-user-max"
    memory = new_shared_memory(USER_BYTES + 1)
    with pytest.raises(TooLarge):
        raw.call("register_buffer", [memory], fd=0)
    os.close(memory)
    with RawClient(fleet.socket) as other:  # of the same user
        for client in [raw, other] * (BUFFERS_MAX // 2):
            client.call("register_buffer", size=1)
        found = refusal(other, "register_buffer", size=1)
        assert isinstance(found, QuotaExceeded) and found.data["bound"] == "buffers-user-max"
    wait_until(lambda: buffers_of_entry(fleet) == BUFFERS_MAX // 2)
    raw.call("deinit_backend")
    assert buffers_of_entry(fleet) == 0


def test_a_tensor_that_fits_no_frame_needs_a_buffer(raw: RawClient) -> None:
    passed = os.memfd_create("passed")
    os.truncate(passed, TENSOR_BYTES_MAX + 4)
    tensor = {"fd": 0, "dimensions": [TENSOR_BYTES_MAX // 4 + 1], "type": "fp32"}
    with pytest.raises(TooLarge):
        raw.call("compute", [passed], context=raw.context("copy"), inputs=[["x0", tensor]])
    os.close(passed)


def test_a_cancelled_computation_leaves_no_buffer_on_its_node(
    raw: RawClient, fleet: RunningFleet
) -> None:
    number = begin_loop(raw)
    node = wait_until(lambda: computing(fleet))
    assert raw.call("cancel", request=number)["cancelled"]
    with pytest.raises(Cancelled):
        raw.wait_result(number)
    until_freed_by(fleet.daemons[node].socket)
    assert buffers_of_entry(fleet) == 1, "it is the client's"


def test_a_computation_on_a_buffer_ends_with_its_time(raw: RawClient) -> None:
    with pytest.raises(Timeout):
        raw.wait_result(begin_loop(raw, timeout_s=0.5))


def test_a_client_that_vanishes_leaves_nothing(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket) as client:
        begin_loop(client)
        node = wait_until(lambda: computing(fleet))
        assert sums_of(fleet.daemons[node].socket).total("buffers") == 1
    until_freed(fleet)
    wait_until(lambda: computing(fleet) is None)


def test_a_node_that_dies_fails_the_computation_alone(tmp_path: Path, config: str) -> None:
    with (
        running_fleet(tmp_path, config, "a", "b", more=MORE) as fleet,
        RawClient(fleet.socket) as raw,
        Client(fleet.socket) as client,
    ):
        number = begin_loop(raw)
        node = wait_until(lambda: computing(fleet))
        os.kill(fleet.daemons[node].pid, signal.SIGKILL)
        with pytest.raises(WorkerCrashed) as caught:
            raw.wait_result(number)
        assert (caught.value.data["cause"], caught.value.data["node"]) == ("node", node)
        [other] = fleet.daemons.keys() - {node}
        x = np.arange(3 << 20, dtype=np.float32)
        with client.graph("copy") as graph:
            np.testing.assert_array_equal(graph.run({"x0": x})["y0"], x)
        # The last node dies while it gets the parts.
        context = raw.context("copy")
        buffer = raw.call("register_buffer", size=LARGE)["buffer"]
        relay = fleet.relays[other].process
        os.kill(relay.pid, signal.SIGSTOP)
        number = raw.start_request(
            "compute", context=context, inputs=[["x0", shared(buffer, LARGE)]]
        )
        wait_until(lambda: ScrapedMetrics(scrape(fleet.metrics))("fleet_requests"))
        relay.kill()
        with pytest.raises(WorkerCrashed) as caught:
            raw.wait_result(number)
        assert caught.value.data["node"] == other
        assert raw.call("read_buffer", buffer=buffer, offset=0, size=1)["data"] == b"\0"
        raw.call("free_buffers", buffers=[buffer])

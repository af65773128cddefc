"""Buffers shared by clients and workers of graphs: tensors in place, bounds, owners, attacks."""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import onnx
import pytest

from inferd import (
    AsyncClient,
    Client,
    InvalidArgument,
    NotFound,
    QuotaExceeded,
    Tensor,
    Timeout,
    TooLarge,
)
from inferd.backends.errors import InferdError
from inferd.backends.shared_memory import SIZE_SEALS, new_shared_memory
from inferd.ipc.client.arrays import tensor_of
from inferd.ipc.messages import BUFFER_PART_BYTES_MAX, BUFFERS_FREED_MAX, TENSOR_BYTES_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.other_users import ADA, BOB, client_of, daemon_for_all
from tests.ir_graphs import write_ir
from tests.onnx_graphs import ELEMENTS, affine, identity, lookup, loop, write_graphs
from tests.raw import RawClient
from tests.tflite_graphs import Signature
from tests.tflite_graphs import affine as tflite_affine
from tests.tflite_graphs import write_graphs as write_tflite
from tests.waiting import wait_until

LARGE = 64 << 20
USER_BYTES = 3 * LARGE
BUFFERS_MAX = 6
FOREVER = 1 << 62
MFD_HUGETLB = 4


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    models = tmp_path_factory.mktemp("models")
    graphs = {"copy": identity("fp32"), "integers": identity("i32", "bool")}
    graphs |= {"affine": affine(), "lookup": lookup(), "loop": loop()}
    write_graphs(models, {**graphs, "halves": identity("fp16", "fp64", "bf16", "u8")})
    config = f"""
[daemon]
cores = 2
buffers-user-max = {BUFFERS_MAX}
buffer-bytes-user-max = {USER_BYTES}
"""
    with running_daemon(config, models_dir=models) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as connected:
        yield connected
        connected.deinit_backend()  # before the next test counts


@pytest.fixture
def raw(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as connected:
        yield connected
        connected.call("deinit_backend")


def refusal(raw: RawClient, call: str, fds: list[int] | None = None, **params: Any) -> InferdError:
    with pytest.raises(InferdError) as caught:
        raw.call(call, fds or [], **params)
    assert caught.value.hint
    return caught.value


def test_64_mib_are_computed_in_place(client: Client) -> None:
    count = LARGE // 4
    buffer = client.buffer(2 * LARGE)
    given, place = buffer.view([count], "float32"), buffer.view([count], offset=LARGE)
    given.array[:] = np.arange(count, dtype=np.float32)
    with client.graph("copy") as graph:
        for number in range(3):
            given.array[-1] = number
            found = graph.run({"x0": given}, out={"y0": place})["y0"]
            assert np.shares_memory(found, place.array)
            assert np.array_equal(found, given.array)
    assert repr(place) == f"<BufferView fp32 [{count}]>"


def test_large_tensors_need_no_buffer_of_the_program(client: Client) -> None:
    with client.graph("copy") as graph:
        for width in (2, 3, 5, 3):  # 8, 12, 20 and 12 MiB
            x = np.arange(width << 20, dtype=np.float32)
            np.testing.assert_array_equal(graph.run({"x0": x})["y0"], x)
            np.testing.assert_array_equal(graph.run({"x0": x[:9]})["y0"], x[:9])
        [output] = graph.run_tensors({"x0": x}).values()
        assert output.data == x.tobytes() and output.dimensions == [len(x)]
        with pytest.raises(TooLarge, match="its place in the buffer"):
            graph.run({"x0": x}, out={"y0": client.buffer(64).view([16])})
        with pytest.raises(TooLarge, match="a buffer of"):
            graph.run({"x0": np.zeros(USER_BYTES // 4 + 1, np.float32)})


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x[::-1],
        lambda x: np.repeat(x, 2)[::2],
        lambda x: x.astype(">f4"),
        lambda x: x.astype(np.int32),
        lambda x: array("f", x.tobytes()),
        lambda x: memoryview(x)[::-1],
    ],
    ids=["plain", "reversed", "strided", "big-endian", "integers", "buffer", "strided buffer"],
)
def test_large_values_of_any_layout_are_computed(
    client: Client, make: Callable[[Any], Any]
) -> None:
    value = make(np.arange(3 << 20, dtype=np.float32))
    with client.graph("copy") as graph:
        for _ in range(2):
            output = graph.run({"x0": value})["y0"]
            np.testing.assert_array_equal(output, np.asarray(value).astype(np.float32))
            output += 1  # it is the program's own


def test_a_large_array_is_only_copied_into_its_buffer() -> None:
    large = np.zeros((TENSOR_BYTES_MAX >> 2) + 1, np.float32)
    assert np.shares_memory(np.frombuffer(tensor_of(large, None, "x").data, "u1"), large)
    assert isinstance(tensor_of(large[1:], None, "x").data, bytes), "it is sent in a frame"


@pytest.mark.asyncio
async def test_large_runs_at_once_do_not_share_a_buffer(daemon: RunningDaemon) -> None:
    arrays = [np.full(n << 20, n, np.float32) for n in (3, 4)]  # of 12 and 16 MiB

    async def run(array: Any) -> None:
        for _ in range(3):
            np.testing.assert_array_equal((await graph.run({"x0": array}))["y0"], array)

    async with AsyncClient(daemon.socket) as client, client.graph("copy") as graph:
        async with anyio.create_task_group() as group:
            for array in arrays:
                group.start_soon(run, array)
        await client.deinit_backend()


def test_outputs_of_many_bytes_are_refused_before_they_are_packed(raw: RawClient) -> None:
    context, size = raw.context("copy"), 12 << 20
    buffer = raw.call("register_buffer", size=size)["buffer"]
    shared = {"buffer": buffer, "length": size, "dimensions": [size // 4], "type": "fp32"}
    refused = refusal(raw, "compute", context=context, inputs=[["x0", shared]])
    assert isinstance(refused, TooLarge) and refused.data["bytes"] == size
    assert "buffer" in refused.hint


def test_a_buffer_of_the_daemons_is_written_and_read_in_parts(raw: RawClient) -> None:
    """Clients that cannot pass descriptors send tensors larger than a frame this way."""
    size = 12 << 20
    buffer = raw.call("register_buffer", size=2 * size)["buffer"]
    part = 1_000_000
    for begin in range(0, size, part):
        data = bytes([begin // part]) * min(part, size - begin)
        raw.call("write_buffer", buffer=buffer, offset=begin, data=data)
    tensor = {"buffer": buffer, "offset": 0, "length": size}
    tensor |= {"dimensions": [size // 4], "type": "fp32"}
    places = [["y0", buffer, size, size]]
    params = {"inputs": [["x0", tensor]], "outputs": places}
    [[name, output]] = raw.call("compute", context=raw.context("copy"), **params)["outputs"]
    assert name == "y0" and "data" not in output, "it is not sent"
    expected = {"buffer": buffer, "offset": size, "length": size, "dimensions": [size // 4]}
    assert output == expected | {"type": 1}
    for begin in range(0, size, part):
        wanted = min(part, size - begin)
        found = raw.call("read_buffer", buffer=buffer, offset=size + begin, size=wanted)
        assert found["data"] == bytes([begin // part]) * wanted


@pytest.mark.anyio
async def test_the_client_reads_and_writes_parts_of_any_size(daemon: RunningDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        found = await client.register_buffer(5 << 20)
        data = np.random.default_rng(3).bytes(found.size - 7)
        await client.write_buffer(found.buffer, 7, data)
        assert await client.read_buffer(found.buffer, 0, found.size) == bytes(7) + data
        buffer = await client.buffer(4096)
        await client.write_buffer(buffer.handle, 1, b"abc")
        assert bytes(buffer.memory[:5]) == b"\0abc\0"
        await client.free_buffers([buffer, found.buffer])
        with pytest.raises(NotFound, match="there is no buffer"):
            await client.read_buffer(found.buffer, 0, 1)


def test_every_type_passes_and_outputs_may_be_mixed(client: Client) -> None:
    buffer = client.buffer(1 << 16)
    half, double = buffer.view([2], "fp16"), buffer.view([2], "fp64", 64)
    brain, bytes_ = buffer.view([2], "bf16", 128), buffer.view([2], "uint8", 192)
    half.array[:], double.array[:], bytes_.array[:] = [1.5, 2], [3, 4], [5, 6]
    brain.array[:] = [0x3FC0, 0x4000]
    inputs: dict[str, Any] = {"x0": half, "x1": double, "x2": brain, "x3": bytes_}
    with client.graph("halves") as graph:
        out = {"y1": buffer.view([8], "fp64", 1024), "y2": buffer.view([4], "bf16", 2048)}
        found = graph.run(inputs, out=out)
        assert [value.tolist() for value in found.values()] == [
            [1.5, 2], [3, 4], [0x3FC0, 0x4000], [5, 6],
        ]  # fmt: skip
        kept = graph.run(inputs, keep=["y0"], out=out)["y0"]
        assert graph.run({**inputs, "x0": kept})["y0"].tolist() == [1.5, 2]
    with client.graph("integers") as graph:
        numbers, truths = buffer.view([3], "i32", 4096), buffer.view([3], "bool", 4160)
        numbers.array[:], truths.array[:] = [-1, 0, 7], [True, False, True]
        found = graph.run({"x0": numbers, "x1": truths})
        assert [value.tolist() for value in found.values()] == [[-1, 0, 7], [True, False, True]]
        truths.memory[0] = 2
        with pytest.raises(InvalidArgument, match="a byte other than 0 and 1"):
            graph.run({"x0": numbers, "x1": truths})


def test_inputs_in_buffers_are_joined_with_others(daemon: RunningDaemon) -> None:
    failures: list[Any] = []

    def call(number: int) -> None:
        with Client(daemon.socket) as client, client.graph("affine") as graph:
            buffer = client.buffer(4096)
            a, y = buffer.view([1, 2]), buffer.view([4, 2], offset=64)
            for n in range(50):
                a.array[:] = [[number, n]]
                found = graph.run({"a": a, "b": [[n, number]]}, out={"y": y})["y"]
                if found.tolist() != [[2 * number + n, 2 * n + number]]:
                    failures.append((number, n, found))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_every_engine_computes_on_buffers_by_every_name_of_an_input(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"onnx": affine()})
    write_ir(tmp_path, {"openvino": affine()})
    signature = Signature({"p": "a", "q": "b"}, {"r": "y"})
    write_tflite(tmp_path, {"litert": tflite_affine(signatures=[signature])})
    names = {"onnx": ("a", "1", "y"), "openvino": ("a", "b", "y"), "litert": ("p", "b", "r")}
    with running_daemon(models_dir=tmp_path) as daemon, Client(daemon.socket) as client:
        buffer = client.buffer(4096)
        a, b, y = (buffer.view([1, 2], offset=offset) for offset in (0, 64, 128))
        a.array[:], b.array[:] = [[1, 2]], [[3, 4]]
        for model, (first, second, output) in names.items():
            y.array[:] = 0
            context = client.init_execution_context(client.load(model))
            inputs = {first: a.as_input(), second: b.as_input()}
            client.compute(context, inputs, places=[y.as_place(output)])
            assert y.array.tolist() == [[5, 8]], model


def test_an_output_that_does_not_fit_is_refused_and_nothing_is_written(client: Client) -> None:
    buffer = client.buffer(4096)
    given, place = buffer.view([8]), buffer.view([4], offset=1024)
    given.array[:] = 1
    with client.graph("copy") as graph:
        with pytest.raises(TooLarge, match="has 32 bytes; its place in the buffer has 16"):
            graph.run({"x0": given}, out={"y0": place})
        assert place.array.tolist() == [0] * 4
        smaller = buffer.view([4])
        assert graph.run({"x0": smaller}, out={"y0": place})["y0"].tolist() == [1] * 4


# The content may change at any time.


def test_an_index_that_changes_during_runs_is_never_out_of_range(client: Client) -> None:
    """Indexes are copied before the engine checks them."""
    descriptor = new_shared_memory(4096)
    buffer = client.register_buffer(fd=descriptor).buffer
    client.write_buffer(buffer, 0, struct.pack("256q", *[1] * 256))
    index = Tensor(buffer=buffer, length=2048, dimensions=[256, 1], type="i64")
    flip = """
import mmap, sys
memory = mmap.mmap(int(sys.argv[1]), 4096)
bad, good = (2**40).to_bytes(8, "little"), (1).to_bytes(8, "little")
print("ready", flush=True)
while True:
    memory[:8] = bad
    memory[:8] = good
"""
    command = [sys.executable, "-c", flip, str(descriptor)]
    with subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE) as flipping:
        os.close(descriptor)
        assert flipping.stdout is not None and flipping.stdout.readline() == b"ready\n"
        refused = 0
        with client.graph("lookup") as graph:
            pid = client.show("lookup")["pid"]
            while not refused:
                try:
                    assert set(graph.run({"i": index})["y"].flatten().tolist()) == {10}
                except InvalidArgument as exc:
                    assert "out of data bounds" in exc.message
                    refused += 1
            assert client.show("lookup")["pid"] == pid
        flipping.kill()


@pytest.mark.asyncio
async def test_runs_that_wait_have_no_copies_of_their_inputs(tmp_path: Path) -> None:
    """Else one user's waiting runs would take the memory of a graph's process."""
    model = onnx.load_from_string(loop())
    for kind in ("i32", "bool"):
        port = onnx.helper.make_tensor_value_info(kind, ELEMENTS[kind], ["m"])
        model.graph.input.append(port)
        model.graph.output.append(
            onnx.helper.make_tensor_value_info(f"y-{kind}", ELEMENTS[kind], ["m"])
        )
        model.graph.node.append(onnx.helper.make_node("Identity", [kind], [f"y-{kind}"]))
    (tmp_path / "many.onnx").write_bytes(model.SerializeToString())
    config = f"[models.many]\nfile = {json.dumps(str(tmp_path / 'many.onnx'))}\nthreads = 1\n"
    with running_daemon(config) as daemon:
        async with AsyncClient(daemon.socket) as client, client.graph("many") as graph:
            buffer = await client.buffer(LARGE)
            small = {"i32": buffer.view([1], "i32"), "bool": buffer.view([1], "bool")}
            large = {
                "i32": buffer.view([LARGE // 8], "i32"),
                "bool": buffer.view([LARGE // 2], "bool", LARGE // 2),
            }
            pid = (await client.show("many"))["pid"]
            async with anyio.create_task_group() as group:
                for inputs, running, waiting in (
                    (small, 1, 0),
                    *((large, 1, n) for n in (1, 2, 3)),
                ):
                    run = partial(graph.run, {"x": [1.0], "times": FOREVER, **inputs})
                    group.start_soon(run)
                    while await counts_of(client, "many") != (running, waiting):
                        pass
                    if not waiting:
                        before = data_bytes(pid)
                assert data_bytes(pid) < before + LARGE // 2
                group.cancel_scope.cancel()


async def counts_of(client: AsyncClient, model: str) -> tuple[int, int]:
    """Return how many computations of a graph run and wait."""
    found = (await client.stats())["models"].get(model, {})
    return found.get("computations_running", 0), found.get("computations_waiting", 0)


def data_bytes(pid: int) -> int:
    """Return the bytes that a process has allocated, which `RLIMIT_DATA` bounds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmData:")[2].split()[0])


@pytest.mark.parametrize(
    "make",
    ["unsealed", "shrinkable", "growable", "resealable", "write-sealed", "read-only", "file",
     "pipe", "empty", "huge pages"],
)  # fmt: skip
def test_only_memory_whose_size_is_fixed_is_mapped(
    raw: RawClient, tmp_path: Path, make: str
) -> None:
    """A client that cuts off a mapped file would end the worker by SIGBUS."""
    seals = {
        "unsealed": 0,
        "shrinkable": SIZE_SEALS & ~fcntl.F_SEAL_SHRINK,
        "growable": SIZE_SEALS & ~fcntl.F_SEAL_GROW,
        "resealable": SIZE_SEALS & ~fcntl.F_SEAL_SEAL,
        "write-sealed": SIZE_SEALS | fcntl.F_SEAL_WRITE,
    }
    fds: list[int] = []
    try:
        if make == "file":
            fds.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
            os.ftruncate(fds[0], 4096)
        elif make == "pipe":
            fds += os.pipe()
        elif make == "huge pages":
            fds.append(os.memfd_create("huge", os.MFD_ALLOW_SEALING | MFD_HUGETLB))
            os.ftruncate(fds[0], 2 << 20)
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, SIZE_SEALS)
        else:
            fds.append(os.memfd_create("made", os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[0], 0 if make == "empty" else 4096)
            fcntl.fcntl(fds[0], fcntl.F_ADD_SEALS, seals.get(make, SIZE_SEALS))
            if make == "read-only":
                fds.insert(0, os.open(f"/proc/self/fd/{fds[0]}", os.O_RDONLY))
        refused = refusal(raw, "register_buffer", fds[:1], fd=0)
        assert refused.name == ("TooLarge" if make == "empty" else "InvalidArgument")
        assert raw.call("register_buffer", size=4096)["size"] == 4096, "the connection goes on"
    finally:
        for fd in fds:
            os.close(fd)


def test_a_hole_in_a_buffer_is_read_as_zeros(client: Client, raw: RawClient) -> None:
    descriptor = new_shared_memory(1 << 20)
    buffer = raw.call("register_buffer", [descriptor], fd=0)["buffer"]
    with mmap.mmap(descriptor, 1 << 20) as memory:
        memory[:4] = struct.pack("f", 1)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.fallocate(descriptor, 3, ctypes.c_long(0), ctypes.c_long(1 << 20)) == 0
    os.close(descriptor)
    tensor = {"buffer": buffer, "offset": 0, "length": 1 << 20}
    tensor |= {"dimensions": [1 << 18], "type": "fp32"}
    params: dict[str, Any] = {"inputs": [["x0", tensor]]}
    [[_, output]] = raw.call("compute", context=raw.context("copy"), **params)["outputs"]
    assert output["data"] == bytes(1 << 20)


# Owners, ends and bounds.


def buffer_input(buffer: int, offset: int = 0, length: int = 8) -> list[Any]:
    tensor = {"buffer": buffer, "offset": offset, "length": length}
    return [["x0", {**tensor, "dimensions": [length // 4], "type": "fp32"}]]


def test_a_buffer_is_not_there_for_another_connection_or_user(tmp_path: Path) -> None:
    write_graphs(tmp_path, {"copy": identity("fp32")})
    config = f"[models.shared]\nfile = {json.dumps(str(tmp_path / 'copy.onnx'))}\n"
    with (
        daemon_for_all(config) as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, ADA) as again,
        client_of(daemon, BOB) as bob,
    ):
        buffer = ada.call("register_buffer", size=4096)["buffer"]
        ada.call("write_buffer", buffer=buffer, offset=0, data=struct.pack("2f", 1, 2))
        for other in (bob, again):
            context = other.context("shared")
            calls: list[tuple[str, dict[str, Any]]] = [
                ("read_buffer", {"offset": 0, "size": 4}),
                ("write_buffer", {"offset": 0, "data": b"x"}),
            ]
            for call, params in calls:
                hers = refusal(other, call, buffer=buffer, **params)
                nobodys = refusal(other, call, buffer=buffer + 1000, **params)
                assert hers.name == nobodys.name == "NotFound"
                assert hers.message.replace(str(buffer), "N") == nobodys.message.replace(
                    str(buffer + 1000), "N"
                )
            inputs = buffer_input(buffer)
            assert refusal(other, "compute", context=context, inputs=inputs).name == "NotFound"
            own = [["x0", {"data": bytes(8), "dimensions": [2], "type": "fp32"}]]
            places = [["y0", buffer, 0, 8]]
            refused = refusal(other, "compute", context=context, inputs=own, outputs=places)
            assert refused.name == "NotFound"
            other.call("free_buffers", buffers=[buffer])
        inputs = buffer_input(buffer)
        [[_, output]] = ada.call("compute", context=ada.context("shared"), inputs=inputs)["outputs"]
        assert struct.unpack("2f", output["data"]) == (1, 2)


def test_a_freed_buffer_is_unknown_and_unmapped(client: Client) -> None:
    buffer = client.buffer(LARGE)
    with client.graph("copy") as graph:
        graph.run({"x0": buffer.view([2])})
        pid = client.show("copy")["pid"]
        wait_until(lambda: mappings_of(pid) == 1)  # the other tests' buffers are unmapped by then
        client.free_buffers([buffer])
        with pytest.raises(NotFound):
            graph.run({"x0": buffer.view([2])})
        assert graph.run({"x0": [1.0]})["y0"].tolist() == [1]
        assert mappings_of(pid) == 0


def is_running(client: Client, model: str) -> bool:
    """Return whether a graph computes, as its worker reports."""
    found = client.stats()["models"].get(model)
    return found is not None and found["computations_running"] > 0


def mappings_of(pid: int) -> int:
    """Return how many buffers a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:inferd-buffer")


def test_a_buffer_without_references_is_freed(client: Client) -> None:
    for _ in range(2 * BUFFERS_MAX):
        client.buffer(4096)


def test_a_killed_client_leaves_no_buffer(daemon: RunningDaemon, client: Client) -> None:
    program = """
import os, sys
from inferd import Client
client = Client(sys.argv[1])
buffers = [client.buffer(int(sys.argv[2])) for _ in range(2)]
with client.graph("loop") as graph:
    x = buffers[0].view([4])
    print("begins", flush=True)
    graph.run({"x": x, "times": 1 << 62}, out={"y": buffers[1].view([4])})
"""
    command = [sys.executable, "-c", program, str(daemon.socket), str(LARGE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None and killed.stdout.readline() == b"begins\n"
        while not is_running(client, "loop"):
            pass
        pid = client.show("loop")["pid"]
        assert mappings_of(pid) == 2
        killed.send_signal(signal.SIGKILL)
    while mappings_of(pid):
        pass
    held: list[Any] = []
    while len(held) < 2:  # all of the bound is free again
        try:
            held.append(client.buffer(USER_BYTES // 2))
        except QuotaExceeded:
            continue
    assert client.show("loop")["pid"] == pid


def test_a_new_process_maps_the_buffers_again(client: Client) -> None:
    buffer = client.buffer(4096)
    given, place = buffer.view([2]), buffer.view([2], offset=64)
    given.array[:] = [1, 2]
    with client.graph("copy") as graph:
        assert graph.run({"x0": given}, out={"y0": place})["y0"].tolist() == [1, 2]
        os.kill(client.show("copy")["pid"], signal.SIGKILL)
        given.array[:] = [3, 4]
        assert graph.run({"x0": given}, out={"y0": place})["y0"].tolist() == [3, 4]


def test_a_process_that_dies_in_a_computation_has_it_done_again(daemon: RunningDaemon) -> None:
    with Client(daemon.socket) as client, client.graph("loop") as graph:
        buffer = client.buffer(4096)
        given, place = buffer.view([2]), buffer.view([2], offset=64)
        given.array[:] = [5, 6]
        times = buffer.view([], "i64", 128)
        times.array[...] = 1 << 62
        found: list[Any] = []

        def call() -> None:
            try:
                found.append(graph.run({"x": given, "times": times}, out={"y": place})["y"])
            except InferdError as exc:
                found.append(exc)

        thread = threading.Thread(target=call)
        thread.start()
        while not is_running(client, "loop"):
            pass
        times.array[...] = 2  # of the next process, which copies it anew
        os.kill(client.show("loop")["pid"], signal.SIGKILL)
        thread.join()
        [outcome] = found
        assert outcome.tolist() == [5, 6]
        client.free_buffers([buffer])


def test_a_cancelled_run_leaves_usable_buffers(client: Client) -> None:
    buffer = client.buffer(4096)
    given, place = buffer.view([2]), buffer.view([2], offset=64)
    with client.graph("loop") as graph:
        for _ in range(2):
            with pytest.raises(Timeout):
                graph.run({"x": given, "times": FOREVER}, out={"y": place}, timeout=0.2)
        given.array[:] = [1, 2]
        found = graph.run({"x": given, "times": 3}, out={"y": place})
        assert found["y"].tolist() == [1, 2]


def test_number_and_bytes_of_a_user_are_bounded(client: Client, raw: RawClient) -> None:
    buffers = [raw.call("register_buffer", size=1)["buffer"] for _ in range(BUFFERS_MAX)]
    refused = refusal(raw, "register_buffer", size=1)
    assert isinstance(refused, QuotaExceeded) and refused.data == {
        "bound": "buffers-user-max",
        "buffers": BUFFERS_MAX,
        "buffers_max": BUFFERS_MAX,
    }
    raw.call("free_buffers", buffers=[*buffers, 7])
    buffer = raw.call("register_buffer", size=USER_BYTES)["buffer"]
    refused = refusal(raw, "register_buffer", size=1)
    assert isinstance(refused, QuotaExceeded)
    assert refused.data["bound"] == "buffer-bytes-user-max"
    with pytest.raises(QuotaExceeded):
        client.buffer(1)
    raw.call("free_buffers", buffers=[buffer])
    descriptor = os.memfd_create("large", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, USER_BYTES + 1)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SIZE_SEALS)
    refused = refusal(raw, "register_buffer", [descriptor], fd=0)
    os.close(descriptor)
    assert isinstance(refused, TooLarge)
    assert client.buffer(1)


def test_the_buffers_of_all_users_are_bounded() -> None:
    with (
        daemon_for_all("buffer-bytes-max = 8192\n") as daemon,
        client_of(daemon, ADA) as ada,
        client_of(daemon, BOB) as bob,
    ):
        buffer = ada.call("register_buffer", size=8000)["buffer"]
        refused = refusal(bob, "register_buffer", size=4096)
        assert refused.name == "Busy" and refused.data["bound"] == "buffer-bytes-max"
        ada.call("free_buffers", buffers=[buffer])
        assert bob.call("register_buffer", size=4096)["buffer"]


def test_parts_outside_a_buffer_are_refused(raw: RawClient, client: Client) -> None:
    buffer = raw.call("register_buffer", size=4096)["buffer"]
    context = raw.context("copy")
    for offset, length in ((4096, 8), (-64, 8), (0, 4100), (64, -4), (1 << 63, 8), (4, 8)):
        refused = refusal(
            raw, "compute", context=context, inputs=buffer_input(buffer, offset, length)
        )
        assert isinstance(refused, InvalidArgument), (offset, length)
        own = [["x0", {"data": bytes(8), "dimensions": [2], "type": "fp32"}]]
        places = [["y0", buffer, offset, length]]
        refused = refusal(raw, "compute", context=context, inputs=own, outputs=places)
        assert isinstance(refused, InvalidArgument), (offset, length)
    for offset, size in ((4096, 1), (-1, 1), (0, -1), (0, 4097), (0, 1 << 62)):
        refused = refusal(raw, "read_buffer", buffer=buffer, offset=offset, size=size)
        assert isinstance(refused, InvalidArgument), (offset, size)
    assert refusal(raw, "write_buffer", buffer=buffer, offset=4095, data=b"ab").name
    large = raw.call("register_buffer", size=4 << 20)["buffer"]
    too_much = BUFFER_PART_BYTES_MAX + 1
    assert refusal(raw, "read_buffer", buffer=large, offset=0, size=too_much).name
    for size in (0, -1):
        assert refusal(raw, "register_buffer", size=size).name == "InvalidArgument"
    too_many = list(range(BUFFERS_FREED_MAX + 1))
    assert refusal(raw, "free_buffers", buffers=too_many).name == "InvalidArgument"
    own_buffer = client.buffer(4096)
    for shape, kind, offset in (
        ([1025], "fp32", 0),
        ([1], "fp32", 4),
        ([1], "x", 0),
        ([-1], "u8", 0),
    ):
        with pytest.raises(InvalidArgument) as caught:
            own_buffer.view(shape, kind, offset)
        assert caught.value.hint


def test_only_graphs_compute_on_buffers(raw: RawClient) -> None:
    buffer = raw.call("register_buffer", size=4096)["buffer"]
    echo = raw.context("echo")
    refused = refusal(raw, "compute", context=echo, inputs=buffer_input(buffer))
    assert "only a graph's" in refused.message
    tensor = buffer_input(buffer)[0][1]
    for model in ("echo", "copy"):
        refused = refusal(raw, "set_input", context=raw.context(model), index=0, tensor=tensor)
        assert "only a graph's" in refused.message
    params: dict[str, Any] = {"context": raw.context("copy"), "inputs": buffer_input(buffer)}
    twice = [["y0", buffer, 0, 8], ["y0", buffer, 64, 8]]
    assert refusal(raw, "compute", **params, outputs=twice).name == "InvalidArgument"
    assert refusal(raw, "compute", **params, outputs=twice[:1], keep=["y0"]).name
    unknown = [["z", buffer, 0, 8]]
    assert refusal(raw, "compute", **params, outputs=unknown).hint == "its outputs are 'y0'"

"""Channels of open graphs against a fake daemon: small computations pass it by, and whatever a
channel does not answer is computed by the daemon.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.from_thread import BlockingPortal

from inferd import (
    AsyncClient,
    Busy,
    Client,
    ConnectionLost,
    InferdError,
    InvalidArgument,
    ShuttingDown,
    Tensor,
    Timeout,
    TooLarge,
    UnsupportedOperation,
    WorkerCrashed,
)
from inferd.ipc.client import channels
from inferd.ipc.client.graphs import AsyncTensorGraph
from inferd.ipc.client.sync_client import TensorGraph
from inferd.wire.spinning import Spinning
from tests.ipc.fake_server import Exchange, FakeServer, fake_server, fixed
from tests.processes import open_descriptors

TENSORS = [{"name": name, "type": "fp32", "shape": ["n"]} for name in ("x", "y")]
SHOWN = {"name": "g", "backend": "onnx", "info": None, "inputs": TENSORS, "outputs": TENSORS}
OPENED = ["show", "load_by_name"]
COMPUTED = ["init_execution_context", "compute"]
NUMBERS = {"x": [1.0, 2.0]}
TENSOR = Tensor(data=b"\0\0\x80?\0\0\0@", dimensions=[2], type="fp32")


def add_graph(server: FakeServer) -> None:
    server.answers["show"] = fixed(models=[SHOWN])
    server.answers["load_by_name"] = fixed(graph=11, model="g", tensors=True)


@asynccontextmanager
async def opened(
    folder: Path, **options: Any
) -> AsyncIterator[tuple[FakeServer, AsyncClient, AsyncTensorGraph]]:
    async with fake_server(folder) as server, AsyncClient(server.path, **options) as client:
        add_graph(server)
        async with client.graph("g") as graph:
            yield server, client, graph


@contextmanager
def opened_in_thread(server: FakeServer, **options: Any) -> Iterator[tuple[Client, TensorGraph]]:
    add_graph(server)
    with Client(server.path, timeout=60, **options) as client, client.graph("g") as graph:
        yield client, graph


async def hold(exchange: Exchange) -> dict[str, Any]:
    return await exchange.hold()


def failing(error: InferdError) -> Callable[[Exchange], Awaitable[dict[str, Any]]]:
    async def fail(_: Exchange) -> dict[str, Any]:
        raise error

    return fail


@pytest.mark.anyio
async def test_small_computations_pass_the_daemon_by(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        for keywords in ({}, {"priority": "high", "queue_timeout": 2.5, "timeout": 60}):
            found = await graph.run_tensors(NUMBERS, **keywords)  # type: ignore[arg-type]
            assert found == {"x": TENSOR}
        assert (await graph.run({"x": TENSOR}))["x"].tolist() == NUMBERS["x"]
        assert server.names() == [*OPENED, "open_channel"]
        assert server.calls[-1][1] == {"graph": 11, "fd": 0}
        inputs = [["x", {"data": TENSOR.data, "dimensions": [2], "type": "fp32"}]]
        assert server.channel_calls == [
            ("compute", {"inputs": inputs}),
            ("compute", {"inputs": inputs, "priority": "high", "queue_timeout_s": 2.5}),
            ("compute", {"inputs": inputs}),
        ]
    assert server.names() == [*OPENED, "open_channel", "unload"]


@pytest.mark.anyio
async def test_other_computations_are_made_by_the_daemon(tmp_path: Path) -> None:
    large = Tensor(data=bytes(channels.INPUT_BYTES_MAX + 4), dimensions=[1], type="fp32")
    async with opened(tmp_path) as (server, client, graph):
        view = (await client.buffer(64)).view([2], "fp32")
        await graph.run_tensors({"x": view})
        await graph.run_tensors(NUMBERS, keep=["y"])
        await graph.run_tensors(NUMBERS, out={"y": view})
        await graph.run_tensors({"x": Tensor(kept=5)})
        await graph.run_tensors({"x": large})
        await graph.run_tensors(
            {"x": TENSOR}, traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01"
        )
        assert "open_channel" not in server.names() and server.names().count("compute") == 6
        with pytest.raises(TypeError, match="did you mean 'timeout'"):
            await graph.run_tensors(NUMBERS, timeouts=5)  # type: ignore[call-arg]
        exact = Tensor(data=bytes(channels.INPUT_BYTES_MAX), dimensions=[1], type="fp32")
        assert await graph.run_tensors({"x": exact}) == {"x": exact}
        assert len(server.channel_calls) == 1


@pytest.mark.anyio
async def test_kept_tensors_without_references_are_freed_before_a_channel_computes(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as (server, _, graph):
        server.answers["compute"] = fixed(outputs=[["y", {"kept": 5, "type": "fp32"}]])
        await graph.run(NUMBERS, keep=["y"])
        server.answers["compute"] = fixed(outputs=[["y", {"data": b""}]])
        gc.collect()
        await graph.run_tensors(NUMBERS)
        await graph.run_tensors(NUMBERS)
        assert [params.get("free") for name, params in server.calls if name == "compute"] == [
            None,
            [5],
        ]
        assert len(server.channel_calls) == 1


@pytest.mark.anyio
async def test_a_run_of_a_graph_that_is_not_open_opens_no_channel(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        add_graph(server)
        assert await client.graph("g").run_tensors(NUMBERS) == {"x": TENSOR}
        assert "open_channel" not in server.names()


@pytest.mark.anyio
async def test_tasks_at_once_share_one_channel(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        found: list[dict[str, Tensor]] = []

        async def run(number: int) -> None:
            [tensor] = (await graph.run_tensors({"x": [float(number)]})).values()
            found.append({"x": tensor})

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(run, number)
        assert len({one["x"].data for one in found}) == 20
        assert server.names() == [*OPENED, "open_channel"]


@pytest.mark.usefixtures("server")
def test_threads_share_one_channel(server: FakeServer) -> None:
    with opened_in_thread(server) as (_, graph), ThreadPoolExecutor(8) as pool:

        def run(number: int) -> list[float]:
            values = [
                graph.run({"x": [number, call]})["x"].tolist() == [number, call]
                for call in range(50)
            ]
            return [float(all(values))]

        assert list(pool.map(run, range(8))) == [[1.0]] * 8
        assert server.names() == [*OPENED, "open_channel"]


@pytest.mark.parametrize("error", [UnsupportedOperation("no"), InvalidArgument("no")])
def test_an_unknown_call_is_not_made_again(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, error: InferdError
) -> None:
    monkeypatch.setattr(channels, "CHANNEL_PAUSE_S", 0.0)
    server.answers["open_channel"] = failing(error)
    with opened_in_thread(server) as (_, graph):
        for _ in range(3):
            assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel", *COMPUTED, "compute", "compute"]


@pytest.mark.parametrize("pause_s", [0.0, 1000.0])
def test_a_refused_channel_is_opened_after_a_pause(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    monkeypatch.setattr(channels, "CHANNEL_PAUSE_S", pause_s)
    opening = server.answers["open_channel"]
    server.answers["open_channel"] = failing(Busy("full", data={"retry_after_s": 0.001}))
    with opened_in_thread(server, retries=3) as (_, graph):
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel", *COMPUTED], "no retry delays the run"
        server.answers["open_channel"] = opening
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert len(server.channel_calls) == (0 if pause_s else 1)


@pytest.mark.anyio
async def test_a_channel_that_is_not_opened_in_time_delays_the_run_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "OPEN_S_MAX", 0.05)
    async with opened(tmp_path) as (server, _, graph):
        server.answers["open_channel"] = hold
        assert await graph.run_tensors(NUMBERS) == {"x": TENSOR}
        await server.await_call("cancel")
        assert server.names().count("open_channel") == 1


async def _close(exchange: Exchange) -> dict[str, Any]:
    exchange.peer.shut_down()
    return await exchange.hold()


async def _send_garbage(exchange: Exchange) -> dict[str, Any]:
    await exchange.peer.send_bytes(b"\xff" * 8)
    return await exchange.hold()


async def _send_no_text(exchange: Exchange) -> dict[str, Any]:
    await exchange.peer.send_bytes(b"\x05\0\0\0\x93\2\1\xa1\xff")  # [2, 1, "…"] that is not UTF-8
    return await exchange.hold()


async def _send_event_and_goodbye(exchange: Exchange) -> dict[str, Any]:
    await exchange.peer.send([4, exchange.number, {"text": b"a"}])
    await exchange.peer.send([6, ShuttingDown("it ends").to_wire()])
    return await exchange.hold()


LOSSES = {
    "closed": _close,
    "garbage": _send_garbage,
    "no text": _send_no_text,
    "goodbye": _send_event_and_goodbye,
    "outputs": fixed(outputs=5),
    "tensor": fixed(outputs=[["x", {"dimensions": "two"}]]),
}


@pytest.mark.anyio
@pytest.mark.parametrize("loss", LOSSES)
async def test_the_daemon_computes_what_a_lost_channel_has_not_answered(
    tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (server, _, graph):
        answering = dict(server.channel_answers)
        server.channel_answers["compute"] = LOSSES[loss]
        assert await graph.run_tensors(NUMBERS, priority="low", timeout=30) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel", *COMPUTED]
        params = server.calls[-1][1]
        assert params["priority"] == "low" and 0 < params["timeout_s"] <= 30
        await server.await_channel_end()
        assert await graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names().count("open_channel") == 1, "there is a pause"
        monkeypatch.setattr(graph._channel, "_open_at", 0.0)  # it is over
        server.channel_answers.update(answering)
        assert await graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names().count("open_channel") == 2 and server.names().count("compute") == 2


@pytest.mark.parametrize("loss", LOSSES)
def test_a_blocking_run_survives_the_loss_of_its_channel(server: FakeServer, loss: str) -> None:
    server.channel_answers["compute"] = LOSSES[loss]
    with opened_in_thread(server) as (_, graph):
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel", *COMPUTED]


def test_a_channel_that_was_closed_between_two_runs_is_noticed(
    server: FakeServer, portal: BlockingPortal
) -> None:
    with opened_in_thread(server) as (_, graph):
        graph.run_tensors(NUMBERS)
        portal.call(server.channels[0].shut_down)
        portal.call(server.await_channel_end)
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel", *COMPUTED]


def test_waits_of_a_blocking_client_may_spin_in_its_channels_alone(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, spin = [], Spinning.poll

    def note_and_spin(spinning: Spinning, poll: Callable[[float], Any], timeout: float) -> Any:
        waits.append(timeout)
        return spin(spinning, poll, timeout)

    monkeypatch.setattr(Spinning, "poll", note_and_spin)
    with opened_in_thread(server) as (_, graph):
        assert not waits
        graph.run_tensors(NUMBERS)
        assert waits


@pytest.mark.anyio
async def test_all_computations_in_flight_survive_the_loss_of_the_channel(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        server.channel_answers["compute"] = hold
        found: list[dict[str, Tensor]] = []

        async def run() -> None:
            found.append(await graph.run_tensors(NUMBERS))

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(run)
            await server.await_channel_call("compute", 5)
            server.channels[0].shut_down()
        assert found == [{"x": TENSOR}] * 5
        assert server.names().count("compute") == 5


@pytest.mark.anyio
async def test_an_error_in_a_channel_reaches_the_caller(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        error = WorkerCrashed("this input has ended the process", data={"cause": "input"})
        server.channel_answers["compute"] = failing(error)
        with pytest.raises(WorkerCrashed, match="this input") as caught:
            await graph.run_tensors(NUMBERS)
        assert caught.value.data == {"cause": "input"}
        assert "compute" not in server.names()
        assert not server.channels[0].ended


@pytest.mark.anyio
@pytest.mark.parametrize("retries", [0, 2])
async def test_a_refused_computation_is_retried_as_often_as_the_client_allows(
    tmp_path: Path, retries: int
) -> None:
    async with opened(tmp_path, retries=retries) as (server, _, graph):
        server.channel_answers["compute"] = failing(Busy("full", data={"retry_after_s": 0.001}))
        with pytest.raises(Busy, match="full"):
            await graph.run_tensors(NUMBERS)
        assert len(server.channel_calls) == 1 + retries and "compute" not in server.names()


@pytest.mark.anyio
async def test_outputs_that_no_frame_takes_are_computed_into_a_buffer(tmp_path: Path) -> None:
    async def compute(exchange: Exchange) -> dict[str, Any]:
        [x, y] = exchange.params["outputs"]
        return {
            "outputs": [
                [name, {"buffer": buffer, "offset": at, "length": 4, "dimensions": [1],
                        "type": "fp32"}]
                for name, buffer, at, _ in (x, y)
            ]
        }  # fmt: skip

    async with opened(tmp_path) as (server, _, graph):
        error = TooLarge("large", data={"bytes": 4096, "reply_bytes_max": 8 << 20})
        server.channel_answers["compute"] = failing(error)
        server.answers["compute"] = compute
        for _ in range(2):
            found = await graph.run_tensors(NUMBERS)
            assert found == {n: Tensor(data=bytes(4), dimensions=[1], type="fp32") for n in "xy"}
        assert len(server.channel_calls) == 1, "the graph remembers it"


@pytest.mark.anyio
async def test_a_timeout_cancels_the_computation_and_keeps_the_channel(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        await graph.run_tensors(NUMBERS)
        answering = server.channel_answers["compute"]
        server.channel_answers["compute"] = hold
        with pytest.raises(Timeout) as caught:
            await graph.run_tensors(NUMBERS, timeout=0.05)
        assert caught.value.data == {"timeout": "total"}
        await server.await_channel_call("cancel")
        assert server.channel_calls[-1][1] == {"request": 2}
        await server.await_idle()
        server.channel_answers["compute"] = answering
        assert await graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel"]


def test_a_timeout_of_a_thread_cancels_the_computation(
    server: FakeServer, portal: BlockingPortal
) -> None:
    with opened_in_thread(server) as (_, graph):
        server.channel_answers["compute"] = hold
        with pytest.raises(Timeout):
            graph.run_tensors(NUMBERS, timeout=0.05)
        portal.call(server.await_channel_call, "cancel")
        portal.call(server.await_idle)
        assert server.names() == [*OPENED, "open_channel"]


@pytest.mark.anyio
async def test_a_cancelled_task_cancels_its_computation(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        server.channel_answers["compute"] = hold
        async with anyio.create_task_group() as group:
            group.start_soon(graph.run_tensors, NUMBERS)
            await server.await_channel_call("compute")
            group.cancel_scope.cancel()
        await server.await_channel_call("cancel")
        await server.await_idle()
        assert not server.channels[0].ended and "compute" not in server.names()


@pytest.mark.anyio
@pytest.mark.parametrize("call", ["open_channel", "compute"])
async def test_a_task_that_is_cancelled_at_any_wait_leaves_no_descriptor(
    tmp_path: Path, call: str
) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        add_graph(server)
        await client.models()
        before = open_descriptors()
        async with client.graph("g") as graph:
            answering = server.answers["open_channel"]
            if call == "open_channel":
                server.answers[call] = hold
            else:
                server.channel_answers[call] = hold
            async with anyio.create_task_group() as group:
                group.start_soon(graph.run_tensors, NUMBERS)
                if call == "open_channel":
                    await server.await_call(call)
                    os.close(server.peers[0].descriptors.pop())
                else:
                    await server.await_channel_call(call)
                group.cancel_scope.cancel()
            server.answers["open_channel"] = answering
            server.channel_answers["compute"] = server.answers["compute"]
            assert await graph.run_tensors(NUMBERS) == {"x": TENSOR}, "the next run opens one"
            assert len(server.channels) == 1
        await server.await_channel_end()
        await anyio.lowlevel.checkpoint()
        assert open_descriptors() == before


def test_a_fork_cannot_use_the_channel_and_leaves_it_to_its_parent(server: FakeServer) -> None:
    with opened_in_thread(server) as (_, graph):
        graph.run_tensors(NUMBERS)
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            child = os.fork()
        if child == 0:
            try:
                graph.run_tensors(NUMBERS)
            except ConnectionLost as exc:
                os.write(write, exc.hint.encode())
            finally:
                os._exit(0)
        os.close(write)
        with open(read) as pipe:
            assert pipe.read() == "make a new Client in the child process"
        os.waitpid(child, 0)
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert server.names() == [*OPENED, "open_channel"], "it is the channel of before"


@pytest.mark.anyio
async def test_a_channel_ends_with_its_graph(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        await graph.run_tensors(NUMBERS)
        await graph.aclose()
        await server.await_channel_end()
        await graph.open()
        await graph.run_tensors(NUMBERS)
        assert len(server.channels) == 2


@pytest.mark.anyio
async def test_the_channel_of_a_forgotten_graph_ends(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        add_graph(server)
        graph = await client.graph("g").open()
        await graph.run_tensors(NUMBERS)
        with pytest.warns(ResourceWarning, match="unclosed <AsyncTensorGraph g>"):
            del graph
            gc.collect()
        await server.await_channel_end()
        await server.await_call("unload")


def test_the_channel_of_a_graph_that_threads_forgot_ends(
    server: FakeServer, portal: BlockingPortal
) -> None:
    add_graph(server)
    with Client(server.path) as client:
        graph = client.graph("g").open()
        graph.run_tensors(NUMBERS)
        with pytest.warns(ResourceWarning, match="unclosed <AsyncTensorGraph g>") as caught:
            del graph
            gc.collect()
        assert len(caught) == 1
        portal.call(server.await_channel_end)


@pytest.mark.anyio
async def test_a_channel_ends_with_its_client(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server:
        add_graph(server)
        client = AsyncClient(server.path)
        graph = await client.graph("g").open()
        await graph.run_tensors(NUMBERS)
        await client.aclose()
        await server.await_channel_end()
        with pytest.raises(ConnectionLost):
            await graph.run_tensors(NUMBERS)
        await graph.aclose()


def test_closing_a_client_ends_the_computations_of_its_channels(
    server: FakeServer, portal: BlockingPortal
) -> None:
    add_graph(server)
    server.channel_answers["compute"] = hold
    client = Client(server.path)
    graph = client.graph("g").open()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(graph.run_tensors, NUMBERS)
        portal.call(server.await_channel_call, "compute")
        client.close()
        with pytest.raises(ConnectionLost, match="closed"):
            run.result(timeout=60)
    portal.call(server.await_channel_end)
    graph.close()


@pytest.mark.anyio
async def test_a_channel_ends_with_the_connection(tmp_path: Path) -> None:
    async with opened(tmp_path) as (server, _, graph):
        await graph.run_tensors(NUMBERS)
        await server.peers[0].stream.aclose()
        await server.await_channel_end()
        with pytest.raises(ConnectionLost):
            await graph.run_tensors(NUMBERS)


def test_a_channel_ends_once_a_thread_notices_the_end_of_the_connection(
    server: FakeServer, portal: BlockingPortal
) -> None:
    with opened_in_thread(server) as (client, graph):
        graph.run_tensors(NUMBERS)
        portal.call(server.peers[0].stream.aclose)
        assert not client.connected
        portal.call(server.await_channel_end)
        with pytest.raises(ConnectionLost):
            graph.run_tensors(NUMBERS)


@pytest.mark.anyio
async def test_a_client_that_reconnects_opens_another_channel(tmp_path: Path) -> None:
    async with opened(tmp_path, reconnect=True) as (server, _, graph):
        await graph.run_tensors(NUMBERS)
        server.channel_answers["compute"] = hold
        async with anyio.create_task_group() as group:
            group.start_soon(graph.run_tensors, NUMBERS)
            await server.await_channel_call("compute", 2)
            await server.peers[0].stream.aclose()
        server.channel_answers["compute"] = server.answers["compute"]
        assert await graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert len(server.channels) == 2 and server.names().count("load_by_name") == 2


def test_a_thread_whose_client_reconnects_opens_another_channel(
    server: FakeServer, portal: BlockingPortal
) -> None:
    with opened_in_thread(server, reconnect=True) as (_, graph):
        graph.run_tensors(NUMBERS)
        portal.call(server.peers[0].stream.aclose)
        portal.call(server.channels[0].shut_down)
        portal.call(server.await_channel_end)
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert graph.run_tensors(NUMBERS) == {"x": TENSOR}
        assert len(server.channels) == 2 and server.names().count("load_by_name") == 2


def test_an_interrupted_run_cancels_its_computation(
    server: FakeServer, portal: BlockingPortal
) -> None:
    class Interrupt(BaseException):
        pass

    async def interrupt(exchange: Exchange) -> dict[str, Any]:
        return await exchange.hold()

    with opened_in_thread(server) as (_, graph):
        graph.run_tensors(NUMBERS)
        server.channel_answers["compute"] = interrupt
        channel = graph._asynchronous._channel
        assert channel is not None and channel._channel is not None
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupt):

            def poll(events: int, s_max: float) -> None:
                portal.call(server.await_channel_call, "compute", 2)
                raise Interrupt

            patch.setattr(channel._channel, "_poll", poll)
            graph.run_tensors(NUMBERS)
        portal.call(server.await_channel_call, "cancel")
        portal.call(server.await_idle)


@pytest.mark.anyio
async def test_a_program_can_have_the_socket_of_a_channel(tmp_path: Path) -> None:
    async with fake_server(tmp_path) as server, AsyncClient(server.path) as client:
        before = open_descriptors()
        with await client.open_channel(11) as sock:
            sock.shutdown(2)
            await server.await_channel_end()
        server.answers["open_channel"] = failing(UnsupportedOperation("no channels"))
        with pytest.raises(UnsupportedOperation, match="no channels"):
            await client.open_channel(11)
        os.close(server.peers[0].descriptors.pop())
        assert open_descriptors() == before

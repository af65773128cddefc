"""A node's relay with a real daemon: frames, reports, and the loss of each side."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.gateways.fleet.certificates import DATA, REPORTS
from inferd.gateways.fleet.link import BUFFER_BYTES, ReportKind
from inferd.gateways.fleet.relay.pipe import DaemonEnd, EntryEnd, PassedFiles, PipeEnd
from inferd.testing import RunningDaemon, running_daemon
from inferd.wire.frames import pack_frame
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.fleet.members import HELLO, WAIT_S_MAX, Peer, Relay, certificates, peer, relay
from tests.waiting import wait_until

CONFIG = echo_model("echo") + echo_model("slow", step_ms=20)
TEXT = "a text that takes the slow model a second or so to echo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("fleet"), "a")


@pytest.fixture(scope="module")
def node(daemon: RunningDaemon, folder: Path) -> Iterator[Relay]:
    with relay(daemon, folder) as running:
        yield running


@asynccontextmanager
async def greeted(folder: Path, node: Relay, **hello: str) -> AsyncIterator[Peer]:
    async with peer(folder, node.port, DATA) as entry:
        entry.send([0, {**HELLO[1], **hello}])
        assert (await entry.receive())[0] == 0
        yield entry


async def begin_stream(entry: Peer, credit: int = 64, model: str = "slow") -> None:
    """Begin a stream as request 3, and wait for its first event."""
    entry.send([1, 1, "load_by_name", {"name": model}])
    graph = (await entry.until(2))[2]["graph"]
    entry.send([1, 2, "init_execution_context", {"graph": graph}])
    context = (await entry.until(2))[2]["context"]
    entry.send([1, 3, "stream", {"context": context, "prompt": TEXT, "credit": credit}])
    await entry.until(4)


@pytest.mark.asyncio
async def test_ids_events_and_credit_pass_unchanged(folder: Path, node: Relay) -> None:
    async with greeted(folder, node) as entry:
        await begin_stream(entry, credit=2, model="echo")
        text = b""
        entry.send([1, 99, "get_output", {"context": 0}])
        assert (await entry.until(3))[1] == 99  # the reply does not come, for want of credit
        entry.send([5, 3, 1000])
        while (message := await entry.receive())[0] == 4:
            assert message[1] == 3
            text += message[2].get("text", b"")
        assert message[:2] == [2, 3]
        assert TEXT.endswith((text + message[2].get("text", b"")).decode())


@pytest.mark.asyncio
async def test_a_user_travels_by_name(folder: Path, node: Relay, daemon: RunningDaemon) -> None:
    async with greeted(folder, node, on_behalf_of="@ada", label="agent-7") as entry:
        await begin_stream(entry)
        with Client(daemon.socket) as client:
            (task,) = client.queue(all_users=True)
            assert (task["user"], task["label"]) == ("@ada", "agent-7")
            assert client.queue() == []


@asynccontextmanager
async def reports(folder: Path, node: Relay) -> AsyncIterator[Peer]:
    async with peer(folder, node.port, REPORTS) as entry:
        yield entry


async def load_with(entry: Peer, **wanted: list[int]) -> dict[str, Any]:
    """Return the model `slow` of the first report that has the values *wanted*."""
    while True:
        model: dict[str, Any] = (await entry.until(ReportKind.LOAD))[1]["models"]["slow"]
        if all(model.get(name, [0, 0, 0, 0]) == value for name, value in wanted.items()):
            return model


@pytest.mark.asyncio
async def test_reports_have_the_daemons_hello_and_the_load_of_its_models(
    folder: Path, node: Relay, daemon: RunningDaemon
) -> None:
    async with reports(folder, node) as entry, greeted(folder, node) as other:
        assert (await entry.receive()) == [ReportKind.PING]
        hello = (await entry.until(ReportKind.HELLO))[1]
        with Client(daemon.socket) as client:
            assert hello["instance"] == client.server.instance
        await begin_stream(other)
        model = await load_with(entry, running=[0, 1, 0, 0])
        assert model["loaded"] and model["slots"] == 4
        assert model["running_tokens"][1] > 0
        other.writer.transport.abort()
        await load_with(entry, running=[0, 0, 0, 0])


@pytest.mark.asyncio
async def test_a_node_learns_the_time_of_a_token(folder: Path, node: Relay) -> None:
    async with reports(folder, node) as entry, greeted(folder, node) as other:
        await begin_stream(other)
        while True:
            model = await load_with(entry)
            if "token_s" in model:  # it is left out while it is the assumption
                break
        assert 0.015 < model["token_s"] < 2


@pytest.mark.asyncio
async def test_an_entry_that_vanishes_ends_its_turns(
    folder: Path, node: Relay, daemon: RunningDaemon
) -> None:
    async with greeted(folder, node) as entry:
        await begin_stream(entry)
    with Client(daemon.socket) as client:
        wait_until(lambda: client.queue() == [])
        wait_until(lambda: client.stats()["connections"] == 1)


@pytest.mark.asyncio
async def test_what_is_not_a_fleets_tls_is_closed(folder: Path, node: Relay) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(WAIT_S_MAX):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()
    async with peer(folder, node.port, "http/1.1") as entry:
        assert await entry.receive() == []
    async with greeted(folder, node):
        pass


@pytest.mark.asyncio
async def test_a_relay_that_is_killed_ends_both_sides(folder: Path, daemon: RunningDaemon) -> None:
    with relay(daemon, folder) as node, Client(daemon.socket) as client:
        async with greeted(folder, node) as entry, reports(folder, node) as listener:
            await begin_stream(entry)
            await listener.until(ReportKind.LOAD)
            node.process.send_signal(signal.SIGKILL)
            while await entry.receive():
                pass
            while await listener.receive():
                pass
            wait_until(lambda: client.queue() == [])


@pytest.mark.asyncio
async def test_a_relay_ends_on_sigterm(folder: Path, daemon: RunningDaemon) -> None:
    with relay(daemon, folder) as node:
        async with greeted(folder, node) as entry:
            node.process.send_signal(signal.SIGTERM)
            assert await entry.receive() == []
            assert await asyncio.to_thread(node.process.wait, WAIT_S_MAX) == 0


@pytest.mark.asyncio
async def test_a_daemon_that_is_killed_ends_its_connections_and_is_reported(folder: Path) -> None:
    async with running_daemon(CONFIG) as daemon:
        with relay(daemon, folder) as node:
            async with greeted(folder, node) as entry, reports(folder, node) as listener:
                await begin_stream(entry)
                first = (await listener.until(ReportKind.HELLO))[1]["instance"]
                await asyncio.to_thread(daemon.kill)
                while await entry.receive():
                    pass
                error = (await listener.until(ReportKind.DAEMON_LOST))[1]
                assert error["name"] == "ConnectionLost"
                async with peer(folder, node.port, DATA) as late:
                    assert (await late.until(6))[1]["name"] == "ConnectionLost"
                await asyncio.to_thread(daemon.start_again)
                assert (await listener.until(ReportKind.HELLO))[1]["instance"] == first + 1


def test_a_user_who_may_not_relay_gets_a_reason(folder: Path) -> None:
    rule = '[access.relay]\nusers = ["root"]\nallow = ["use", "see-all"]\n'
    arguments = ("fleet", "node", "a", "--listen", "127.0.0.1:0", "--certificates", str(folder))
    with (
        running_daemon(rule) as daemon,
        inferd_process(*arguments, socket=daemon.socket) as process,
    ):
        _, errors = process.communicate(timeout=WAIT_S_MAX)
        assert process.returncode == 1
        assert b"does not let this user relay" in errors and b"delegate" in errors


@pytest.mark.asyncio
async def test_a_reader_that_stops_makes_the_sender_wait() -> None:
    loop = asyncio.get_running_loop()
    sender, left = socket.socketpair()
    right, reader = socket.socketpair()
    for sock in (sender, left, right, reader):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    _, one = await loop.create_unix_connection(PipeEnd, sock=left)
    _, two = await loop.create_unix_connection(PipeEnd, sock=right)
    one.join(two)
    assert one.transport is not None
    data, sent, is_full = os.urandom(1 << 16), 0, False
    async with asyncio.timeout(WAIT_S_MAX):
        while one.transport.is_reading() or not is_full:
            try:
                sent += sender.send(data)
                is_full = False
            except BlockingIOError:
                is_full = True
                await asyncio.sleep(0)
    assert BUFFER_BYTES < sent < 4 * BUFFER_BYTES
    received = 0
    while received < sent:
        received += len(await loop.sock_recv(reader, 1 << 16))
    sender.close()
    async with asyncio.timeout(WAIT_S_MAX):
        while await loop.sock_recv(reader, 1 << 16):
            pass
    reader.close()


@pytest.mark.asyncio
async def test_descriptors_wait_for_the_data_before_them_and_keep_their_place() -> None:
    loop, files = asyncio.get_running_loop(), PassedFiles()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        entry = socket.create_connection(listener.getsockname())
        left, _ = listener.accept()
    right, daemon = socket.socketpair()
    for sock in (entry, left, right, daemon):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    _, one = await loop.create_connection(lambda: EntryEnd(lambda: None, files), sock=left)
    _, two = await loop.create_unix_connection(lambda: DaemonEnd(files), sock=right)
    one.join_daemon(two)
    plain = [1, 1, "models", {"filling": b"x" * 100_000}]
    request = [1, 2, "set_input", {"fd": 0}]
    body = pack_frame(request)[4:]
    messages: list[list[Any]] = [plain, [100, b"content"], [101], [102, body], plain]
    await loop.sock_sendall(entry, b"".join(pack_frame(message) for message in messages))
    received, descriptors, places = b"", [], []
    expected = pack_frame(plain) + pack_frame(request) + pack_frame(plain)
    async with asyncio.timeout(WAIT_S_MAX):
        while len(received) < len(expected):
            readable = asyncio.Event()
            loop.add_reader(daemon, readable.set)
            await readable.wait()
            loop.remove_reader(daemon)
            data, passed, _, _ = socket.recv_fds(daemon, 1 << 12, 8)
            places += [len(received)] * len(passed)
            descriptors += passed
            received += data
    assert received == expected
    (descriptor,) = descriptors
    assert os.pread(descriptor, 100, 0) == b"content"
    # They arrive with a byte of the request, or with one before it.
    assert places[0] < len(pack_frame(plain) + pack_frame(request))
    os.close(descriptor)
    for sock in (entry, daemon):
        sock.close()

"""A client's connection in the daemon, on a socket pair: when the daemon reads from it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.lowlevel import checkpoint

from inferd.backends.errors import ProtocolError
from inferd.backends.fd_frames import LENGTH
from inferd.ipc.messages import CREDIT_MAX
from inferd.ipc.peer import peer_of
from inferd.ipc.server import socket_connection
from inferd.ipc.server.connection import Request, ServerConnection
from inferd.ipc.server.descriptors import ClientDescriptors
from inferd.ipc.server.fairness import LoopTime, SharedLimit
from inferd.ipc.server.request_bytes import RequestBytes
from inferd.ipc.server.socket_connection import (
    OUTBOX_PAUSE_BYTES,
    OUTBOXES_BYTES_MAX,
    REQUESTS_BYTES,
    Pause,
)
from inferd.wire.frames import READ_BYTES

pytestmark = pytest.mark.asyncio
MUCH = b"x" * (2 * OUTBOX_PAUSE_BYTES)


class Reader:
    """Reads from a connection in a task; records the data, and sets events."""

    def __init__(self, connection: ServerConnection):
        self.received: list[bytes] = []
        self.missing = 0
        """Bytes of an incomplete frame that are said to be missing after each read."""
        self.data_received, self.ended = anyio.Event(), anyio.Event()
        self._connection = connection

    def _add_data(self, data: bytes) -> int:
        self.received.append(data)
        self.data_received.set()
        return self.missing

    async def read_until_end(self) -> None:
        await self._connection.receive(self._add_data)
        self.ended.set()


@asynccontextmanager
async def pair(
    outboxes: SharedLimit | None = None,
) -> AsyncIterator[tuple[ServerConnection, socket.socket]]:
    ours, client = socket.socketpair()
    ours.setblocking(False)
    user = ClientDescriptors().of_user(0)
    shared = outboxes or SharedLimit(OUTBOXES_BYTES_MAX)
    counts = RequestBytes()
    connection = ServerConnection(ours, peer_of(ours), 8, user, shared, LoopTime(), counts)
    with client, anyio.fail_after(60):
        yield connection, client
        connection.close()


@asynccontextmanager
async def reading(
    outboxes: SharedLimit | None = None,
) -> AsyncIterator[tuple[ServerConnection, socket.socket, Reader]]:
    async with pair(outboxes) as (connection, client), anyio.create_task_group() as group:
        reader = Reader(connection)
        group.start_soon(reader.read_until_end)
        await settle()
        yield connection, client, reader
        group.cancel_scope.cancel()


async def settle() -> None:
    """Let the loop poll its sockets often enough to handle everything that is ready."""
    for _ in range(10):
        await checkpoint()


async def test_a_client_that_leaves_much_unread_is_not_read_from_until_it_has_read() -> None:
    async with reading() as (connection, client, reader):
        connection.send(MUCH)
        client.send(b"hello")
        await settle()
        assert not reader.received

        unread = len(MUCH)
        while unread > 0:
            unread -= len(await asyncio.to_thread(client.recv, 1 << 20))
        await reader.data_received.wait()
        assert reader.received == [b"hello"]


async def test_a_client_that_leaves_little_unread_is_read_from() -> None:
    async with reading() as (connection, client, reader):
        connection.send(b"x" * (OUTBOX_PAUSE_BYTES - 100))
        client.send(b"hello")

        await reader.data_received.wait()


@pytest.mark.parametrize(("missing", "then"), [(0, REQUESTS_BYTES), (READ_BYTES, READ_BYTES)])
async def test_only_the_rest_of_a_large_frame_is_read_in_large_parts(
    missing: int, then: int
) -> None:
    async with reading() as (_, client, reader):
        reader.missing = missing
        client.send(bytes(3 * READ_BYTES))  # empty frames
        await settle()
        assert [len(part) for part in reader.received][:2] == [REQUESTS_BYTES, then]


@pytest.mark.parametrize("size", [REQUESTS_BYTES + 1, REQUESTS_BYTES + READ_BYTES, 1 << 20])
async def test_a_large_frame_that_has_arrived_is_read_at_once(size: int) -> None:
    async with reading() as (_, client, reader):
        frame = LENGTH.pack(size - LENGTH.size).ljust(size, b"x")
        sent = client.send(frame[: 4 * READ_BYTES] + bytes(8))
        await settle()
        assert len(reader.received[0]) == min(size, REQUESTS_BYTES + READ_BYTES)
        assert sum(map(len, reader.received)) == sent


async def test_a_large_frame_of_which_a_part_has_arrived_is_read_as_far_as_that() -> None:
    async with reading() as (_, client, reader):
        client.send(LENGTH.pack(READ_BYTES).ljust(REQUESTS_BYTES, b"x"))
        await reader.data_received.wait()
        assert [len(part) for part in reader.received] == [REQUESTS_BYTES]


async def test_the_end_of_a_client_that_is_not_read_from_is_noticed() -> None:
    async with reading() as (connection, client, reader):
        connection.send(MUCH)
        client.send(b"hello")
        await settle()
        client.close()

        await reader.ended.wait()
        assert not reader.received


async def test_the_end_of_a_client_with_unread_replies_is_noticed_behind_its_requests() -> None:
    async with reading() as (connection, client, reader):
        connection.send(b"unread")
        client.send(b"x" * (REQUESTS_BYTES + 1))
        client.close()

        await reader.ended.wait()
        assert len(b"".join(reader.received)) == REQUESTS_BYTES + 1


async def test_a_client_past_the_outbox_bound_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket_connection, "OUTBOX_BYTES_MAX", OUTBOX_PAUSE_BYTES)
    async with reading() as (connection, _, reader):
        connection.send(MUCH)

        await reader.ended.wait()


@pytest.mark.parametrize("error", [ProtocolError("unreadable"), ZeroDivisionError()])
async def test_an_exception_of_the_callback_ends_reading(error: Exception) -> None:
    def refuse(_: bytes) -> int:
        raise error

    async with pair() as (connection, client):
        client.send(b"hello")
        with pytest.raises(type(error)):
            await connection.receive(refuse)


async def test_cancelled_reading_leaves_no_callback_behind() -> None:
    async with pair() as (connection, client):
        connection.send(MUCH)
        client.send(b"hello")
        with anyio.move_on_after(0.01):
            await connection.receive(lambda _: 0)
        connection.cut()

        loop = asyncio.get_running_loop()
        assert not loop.remove_reader(connection._sock)
        assert not loop.remove_writer(connection._sock)


async def test_a_user_past_their_part_of_all_outboxes_is_disconnected() -> None:
    outboxes = SharedLimit(3 * OUTBOX_PAUSE_BYTES)
    async with (
        reading(outboxes) as (one, _, first),
        reading(outboxes) as (two, _, second),
    ):
        one.send(b"x" * OUTBOX_PAUSE_BYTES)
        assert 0 < outboxes.total <= OUTBOX_PAUSE_BYTES + 100
        two.send(MUCH)
        await second.ended.wait()
        assert not first.ended.is_set()
    assert outboxes.total == 0


async def test_read_data_no_longer_counts() -> None:
    outboxes = SharedLimit(OUTBOXES_BYTES_MAX)
    async with reading(outboxes) as (connection, client, _):
        connection.send(MUCH)
        assert outboxes.held_by(connection.uid) > OUTBOX_PAUSE_BYTES
        unread = len(MUCH)
        while unread > 0:
            unread -= len(await asyncio.to_thread(client.recv, 1 << 20))
        await settle()
        assert outboxes.total == 0


async def test_a_paused_connection_is_not_read_from_until_it_is_resumed() -> None:
    async with reading() as (connection, client, reader):
        connection.pause_reading(Pause.FRAME)
        client.send(b"hello")
        await settle()
        assert not reader.received

        connection.resume_reading(Pause.FRAME)
        await reader.data_received.wait()


async def test_a_paused_connection_stays_paused_when_its_outbox_is_read() -> None:
    async with reading() as (connection, client, reader):
        connection.send(MUCH)
        client.send(b"hello")
        await settle()
        connection.pause_reading(Pause.FRAME)
        unread = len(MUCH)
        while unread > 0:
            unread -= len(await asyncio.to_thread(client.recv, 1 << 20))
        await settle()
        assert not reader.received


async def test_early_credit_is_passed_on_within_the_bound() -> None:
    async with pair() as (connection, _):
        request = Request(connection, 1, "stream", None)
        granted: list[int] = []
        request.grant_credit(1000)
        request.grant_credit(-5)
        request.grant_credit(1000)
        request.pass_credit_to(granted.append)
        request.grant_credit(7)
        request.grant_credit(10**6)
        assert granted == [CREDIT_MAX, 7, CREDIT_MAX]


async def test_a_client_that_sends_no_more_is_served_until_its_requests_are_answered() -> None:
    async with reading() as (connection, client, reader):
        request = connection.requests[1] = Request(connection, 1, "chat", None)
        connection.send(MUCH)
        client.shutdown(socket.SHUT_WR)
        unread = len(MUCH)
        while unread > 0:
            unread -= len(await asyncio.to_thread(client.recv, 1 << 20))
        await settle()
        assert not reader.ended.is_set()
        connection.send(MUCH)
        connection.request_ended(request)
        await settle()
        assert not reader.ended.is_set(), "the reply is not sent yet"
        while not reader.ended.is_set():
            await asyncio.to_thread(client.recv, 1 << 20)


async def test_the_end_of_a_client_that_sends_no_more_is_noticed() -> None:
    async with reading() as (connection, client, reader):
        connection.requests[1] = Request(connection, 1, "chat", None)
        client.shutdown(socket.SHUT_WR)
        await settle()
        assert not reader.ended.is_set()
        client.close()
        await reader.ended.wait()

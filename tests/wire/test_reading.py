"""Reading of sockets on the event loops of asyncio and uvloop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial

import anyio
import pytest
import uvloop

from inferd.wire.reading import SocketReading, read_until_end

LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
PART = 8


class Received:
    """The data of a socket, read in parts of `PART` bytes."""

    def __init__(self, sock: socket.socket):
        self.data = b""
        self._sock = sock

    def read_once(self) -> bool:
        try:
            part = self._sock.recv(PART)
        except ConnectionResetError:
            return False
        self.data += part
        return bool(part)


def run(loop: Callable[[], asyncio.AbstractEventLoop], main: Callable[[], object]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()  # type: ignore[misc]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


@LOOPS
@pytest.mark.parametrize("size", [0, 1, PART, 5 * PART + 1])
def test_the_end_of_a_peer_with_unread_data_is_noticed_behind_its_last_data(
    loop: Callable[[], asyncio.AbstractEventLoop], size: int
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            received = Received(ours)
            async with anyio.create_task_group() as group:
                group.start_soon(partial(read_until_end, ours, received.read_once))
                await anyio.lowlevel.checkpoint()
                ours.send(b"never read")
                theirs.send(b"x" * size)
                theirs.close()
            assert received.data == b"x" * size

    run(loop, main)


@LOOPS
def test_nothing_is_read_while_reading_is_stopped(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        arrived = anyio.Event()
        with ours, theirs:
            received = Received(ours)

            def read_once() -> bool:
                reading.stop()
                arrived.set()
                return received.read_once()

            reading = SocketReading(ours, read_once)
            reading.start()
            theirs.send(b"x" * 3 * PART)
            await arrived.wait()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            assert received.data == b"x" * PART
            arrived = anyio.Event()
            reading.start()
            await arrived.wait()
            assert received.data == b"x" * 2 * PART

    run(loop, main)


@LOOPS
def test_an_exception_of_a_read_ends_the_reading_task(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()

        def read_once() -> bool:
            raise ValueError(ours.recv(PART))

        with ours, theirs:
            theirs.send(b"x")
            with pytest.raises(ValueError, match="x"):
                await read_until_end(ours, read_once)

    run(loop, main)

"""The daemon's end of an encoder process that sends garbage, or too much."""

from __future__ import annotations

import os
import socket

import anyio
import msgspec
import pytest

from inferd.backends import media_process as p
from inferd.backends.fd_frames import send_frame
from inferd.daemon.media.encoder_process import REPLY_BYTES_MAX, EncoderProcess, ProcessLost
from inferd.daemon.workers.process import start_spawner
from inferd.wire.frames import pack_frame

from .encoders import open_files

pytestmark = [pytest.mark.asyncio, pytest.mark.process]
READ = p.ReadContent("image")
ECHO = "inferd.backends.echo.media_program"


def process_with(sock: socket.socket) -> EncoderProcess:
    """Return a process whose other end is a test."""
    sock.setblocking(False)
    process = EncoderProcess("none", dict)
    process._socket = sock
    return process


@pytest.mark.parametrize(
    "garbage",
    [
        pack_frame(["no such message"]),
        pack_frame(p.ContentRead([])) * 2,
        pack_frame(p.ContentRead([])) + b"\0",
        (REPLY_BYTES_MAX + 1).to_bytes(4, "little"),
        b"\1\0\0\0\xc1",
    ],
)
async def test_garbage_is_evidence_against_the_content(garbage: bytes) -> None:
    ours, theirs = socket.socketpair()
    with anyio.fail_after(60), ours, theirs:
        process = process_with(ours)
        theirs.sendall(garbage)
        with pytest.raises(ProcessLost):
            await process.request(READ, seconds_max=60)
        assert process.sent_garbage


async def test_an_answer_in_parts_with_its_descriptors() -> None:
    ours, theirs = socket.socketpair()
    before = open_files()
    with anyio.fail_after(60), ours, theirs:
        process = process_with(ours)
        read, write = os.pipe()
        answer = p.ContentEncoded([True] * 64, 1.5)
        frame = pack_frame(answer)
        socket.send_fds(theirs, [frame[:3]], [read] * 64)
        replies = []

        async def request() -> None:
            replies.append(await process.request(READ, seconds_max=60))

        async with anyio.create_task_group() as group:
            group.start_soon(request)
            await anyio.wait_all_tasks_blocked()
            theirs.sendall(frame[3:])
        [(reply, descriptors)] = replies
        assert reply == answer and len(descriptors) == 64
        for descriptor in (*descriptors, read, write):
            os.close(descriptor)
        assert await process.end() is None
    assert len(open_files()) == len(before) - 2


async def test_descriptors_of_an_answer_that_never_ends_are_closed() -> None:
    ours, theirs = socket.socketpair()
    before = open_files()
    with anyio.fail_after(60), ours, theirs:
        process = process_with(ours)
        socket.send_fds(theirs, [pack_frame(p.ContentRead([]))[:3]], [0, 0])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ProcessLost):
            await process.request(READ, seconds_max=60)
        assert len(open_files()) == len(before) + 2
        await process.end()
    assert len(open_files()) == len(before) - 2


async def test_a_process_has_its_socket_as_standard_input_and_its_exit_is_noticed() -> None:
    start_spawner()
    before = open_files()
    process, content = EncoderProcess(ECHO, lambda: {"model": "m"}), os.memfd_create("empty")
    with anyio.fail_after(60):
        await process.start()
        reply, _ = await process.request(READ, content, seconds_max=60)
        assert reply == p.ContentRead([p.ItemPiece(1, 1)]) and not process.has_exited
        assert process._socket is not None
        process._socket.shutdown(socket.SHUT_WR)
        await anyio.wait_readable(process.exit_fileno())
        assert process.has_exited and await process.end() == 0
    os.close(content)
    assert not open_files().items() - before.items()


async def test_frames_of_both_ends_are_the_same() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_frame(theirs, msgspec.msgpack.encode(READ))
        assert ours.recv(1000) == pack_frame(READ)

"""The daemon's end of a worker's socket pair: commands that a worker does not read, by user."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from inferd.backends.errors import Busy
from inferd.daemon.workers.process_client import NO_USER
from inferd.daemon.workers.worker import WorkerLink
from inferd.ipc.server.request_bytes import RequestBytes
from inferd.scheduler import messages as m
from inferd.scheduler.owner import Owner, Requester
from inferd.scheduler.worker import SocketLink
from tests.daemon.workers.test_recovery import client_of
from tests.processes import open_descriptors

pytestmark = pytest.mark.asyncio
ADA, BOB = Requester(Owner(1)), Requester(Owner(2))
TEXT_BYTES = 1 << 20


class Unsent(Counter[int]):
    """The unsent bytes by user, and an event that is set once there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.none = asyncio.Event()

    def count(self, user: int, size: int) -> None:
        self[user] += size
        if not any(self.values()):
            self.none.set()


def text_of(requester: Requester, number: int) -> m.Tokenize:
    return m.Tokenize(number, b"x" * TEXT_BYTES, special=True, bos=True, requester=requester)


@asynccontextmanager
async def exchanging() -> AsyncIterator[tuple[WorkerLink, Unsent, socket.socket]]:
    """Yield a link, its counts, and the worker's socket, which nobody reads."""
    unsent, client = Unsent(), client_of([])
    link = WorkerLink(*(lambda _: None, lambda: None, lambda: None), client.user_of, unsent.count)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with anyio.fail_after(60), ours, theirs:
        async with anyio.create_task_group() as group:
            group.start_soon(link.exchange, ours)
            await anyio.lowlevel.checkpoint()
            yield link, unsent, theirs
            link.end_exchange()


async def test_commands_that_a_worker_does_not_read_count_for_their_user() -> None:
    async with exchanging() as (link, unsent, theirs):
        for number in range(3):
            link.send_command(text_of(ADA, number))
        link.send_command(text_of(BOB, 3))
        while not unsent:
            await anyio.lowlevel.checkpoint()
        assert 3 * TEXT_BYTES < unsent[1] < 3 * TEXT_BYTES + 1000
        assert TEXT_BYTES < unsent[2] < TEXT_BYTES + 1000

        worker, received = SocketLink(theirs), list[m.Command]()
        while len(received) < 4:
            received += worker.receive_commands(0)
            await anyio.lowlevel.checkpoint()
        await unsent.none.wait()


async def test_commands_for_a_process_that_has_ended_count_no_more() -> None:
    async with exchanging() as (link, unsent, theirs):
        link.send_command(text_of(ADA, 1))
        while not unsent:
            await anyio.lowlevel.checkpoint()
        theirs.close()
        await unsent.none.wait()


async def test_a_text_whose_caller_is_cancelled_is_dropped() -> None:
    sent = list[m.Command]()
    texts = client_of(sent).texts_of(ADA)
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: texts.tokenize(b"text", special=True, bos=True))
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert isinstance(sent[0], m.Tokenize) and sent[1:] == [m.DropInput(sent[0].id)]


async def test_a_user_with_too_much_unsent_is_refused_and_nobody_else() -> None:
    sent, request_bytes = list[m.Command](), RequestBytes(user_max=TEXT_BYTES)
    client = client_of(sent, request_bytes)
    request_bytes.add(ADA.owner.user, 2 * TEXT_BYTES)
    for query in (
        client.texts_of(ADA).detokenize([1]),
        client.count_cached_tokens(ADA.owner, "s", (), [1]),
    ):
        with pytest.raises(Busy):
            await query
    assert not sent and not client.queries
    with anyio.move_on_after(0.01):
        await client.texts_of(BOB).detokenize([1])
    assert isinstance(sent[0], m.Detokenize)


async def test_the_user_of_a_command() -> None:
    client = client_of([])
    assert client.user_of(m.Lookup(1, 7, "s", (), b"")) == 7
    assert client.user_of(m.Credit(1, 2)) == client.user_of(m.Stats(1)) == NO_USER


def ready(number: int, content: bytes) -> tuple[m.MediaReady, int]:
    """Return a command, and a descriptor of *content*."""
    descriptor = os.memfd_create("embeddings")
    os.pwrite(descriptor, content, 0)
    return m.MediaReady(b"%d" % number), descriptor


def open_files() -> int:
    return len(open_descriptors())


async def test_descriptors_arrive_in_the_order_of_their_commands() -> None:
    before = open_files()
    async with exchanging() as (link, _, theirs):
        expected, received = list[m.Command](), list[m.Command]()
        for number in range(100):
            command, descriptor = ready(number, b"%d" % number)
            link.send_command(command, descriptor)
            other = text_of(ADA, number) if number % 10 == 0 else m.Credit(number, 1)
            link.send_command(other)
            expected += [command, other]
        worker = SocketLink(theirs)
        while len(received) < len(expected):
            received += worker.receive_commands(0)
            await anyio.lowlevel.checkpoint()
        assert [type(command) for command in received] == [type(c) for c in expected]
        passed = [command.fd for command in received if isinstance(command, m.MediaReady)]
        assert [os.pread(descriptor, 100, 0) for descriptor in passed] == [
            b"%d" % number for number in range(100)
        ]
        for descriptor in passed:
            os.close(descriptor)
        del worker
    assert open_files() == before, "each is closed after it was sent"


async def test_descriptors_that_were_not_sent_are_closed_with_the_link() -> None:
    before = open_files()
    async with exchanging() as (link, unsent, theirs):
        for number in range(10):
            link.send_command(text_of(ADA, number))
            link.send_command(*ready(number, b""))
        while not unsent:
            await anyio.lowlevel.checkpoint()
        theirs.close()
        await unsent.none.wait()
    link.send_command(*ready(11, b""))
    assert open_files() == before


async def test_a_descriptor_for_a_process_that_was_never_started_is_closed_with_it() -> None:
    before = open_files()
    async with exchanging() as (link, _, _):
        link.send_command(*ready(1, b""))
        link.end_exchange()
    assert open_files() == before

"""Operations on descriptors that clients pass: order, results, bounds, and cancellation."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from functools import partial

import anyio
import pytest

from inferd.backends.errors import Busy, InvalidArgument, Timeout
from inferd.backends.fd_frames import SCM_MAX_FD
from inferd.ipc.server import descriptors
from inferd.ipc.server.descriptors import USERS_WITH_THREADS, ClientDescriptors

pytestmark = pytest.mark.asyncio


def fail() -> None:
    raise InvalidArgument("not a file")


async def until_closed(user: descriptors.UserDescriptors) -> None:
    """Wait for the operations submitted so far."""
    await user.run(int)


async def test_an_operation_returns_or_raises_in_its_call() -> None:
    user = ClientDescriptors().of_user(0)
    assert await user.run(len, "four") == 4
    with pytest.raises(InvalidArgument):
        await user.run(fail)


async def test_descriptors_are_closed_after_the_operations_on_them() -> None:
    user = ClientDescriptors().of_user(0)
    reader, writer = os.pipe()
    os.close(writer)
    user.note_received(1)
    holding, going_on = threading.Event(), threading.Event()

    def read() -> bytes:
        holding.set()
        going_on.wait(5)
        return os.read(reader, 1)

    task = asyncio.ensure_future(user.run(read))
    await asyncio.to_thread(holding.wait, 5)
    user.close((reader,))
    assert user.count == 1
    going_on.set()
    assert await task == b""
    await until_closed(user)
    assert user.count == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


async def test_a_cancelled_call_never_runs_a_waiting_operation() -> None:
    user = ClientDescriptors().of_user(0)
    going_on, ran = threading.Event(), threading.Event()
    first = asyncio.ensure_future(user.run(partial(going_on.wait, 90)))
    second = asyncio.ensure_future(user.run(ran.set))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    going_on.set()
    await first
    await until_closed(user)
    assert not ran.is_set()


async def test_an_operation_that_takes_too_long_ends_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(descriptors, "OPERATION_S_MAX", 0.01)
    user, going_on = ClientDescriptors().of_user(0), threading.Event()
    with pytest.raises(Timeout):
        await user.run(partial(going_on.wait, 90))
    going_on.set()


async def test_one_users_operations_do_not_wait_for_anothers() -> None:
    everybody, going_on = ClientDescriptors(), threading.Event()
    ada, bob = everybody.of_user(1), everybody.of_user(2)
    waiting = asyncio.ensure_future(ada.run(partial(going_on.wait, 90)))
    with anyio.fail_after(60):
        assert await bob.run(int) == 0
    assert not waiting.done()
    going_on.set()
    assert await waiting


async def test_calls_are_refused_from_the_users_limit_on_and_messages_later() -> None:
    everybody = ClientDescriptors(user_max=10)
    user, other = everybody.of_user(1), everybody.of_user(2)
    user.note_received(10)
    user.check_call()
    user.note_received(1)
    with pytest.raises(Busy) as refused:
        user.check_call()
    assert refused.value.data["descriptors_user_max"] == 10
    user.check_read()
    other.check_call()
    user.note_received(SCM_MAX_FD)
    with pytest.raises(Busy):
        user.check_read()
    other.check_read()


async def test_calls_are_refused_from_the_limit_of_all_users_on() -> None:
    everybody = ClientDescriptors(total_max=10)
    user, other = everybody.of_user(1), everybody.of_user(2)
    user.note_received(10)
    other.note_received(1)
    with pytest.raises(Busy) as refused:
        other.check_call()
    assert refused.value.data["descriptors_max"] == 10


async def test_users_beyond_the_bound_share_their_threads() -> None:
    everybody = ClientDescriptors()
    users = [everybody.of_user(uid) for uid in range(USERS_WITH_THREADS)]
    assert everybody.of_user(USERS_WITH_THREADS) is everybody.of_user(USERS_WITH_THREADS + 1)
    assert everybody.of_user(0) is users[0]


async def closed_within(sock: socket.socket, seconds: float) -> bool:
    """Return whether the other end of *sock* is closed within that time."""
    poll = select.poll()
    poll.register(sock, 0)  # a hang-up is reported in any case
    return bool(await asyncio.to_thread(poll.poll, 1000 * seconds))


async def test_few_sockets_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LINGER_S", 60.0)
    monkeypatch.setattr(descriptors, "LINGERING_MAX", 2)
    everybody = ClientDescriptors()
    pairs = [socket.socketpair() for _ in range(3)]
    for uid, (_, theirs) in enumerate(pairs):
        everybody.of_user(uid).end_connection(theirs, has_goodbye=True)
    assert await closed_within(pairs[2][0], 5)
    assert not await closed_within(pairs[0][0], 0) and not await closed_within(pairs[1][0], 0)
    everybody.end_lingering()
    for ours, _ in pairs:
        with ours:
            assert await closed_within(ours, 5)


async def test_lingering_sockets_are_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LINGER_S", 0.01)
    everybody = ClientDescriptors()
    ours, theirs = socket.socketpair()
    everybody.of_user(0).end_connection(theirs, has_goodbye=True)
    assert list(everybody.lingering) == [theirs]
    with ours:
        assert await closed_within(ours, 5)
    assert not everybody.lingering

"""Bounds on incomplete frames: bytes per user and in all, and time."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from inferd.backends.errors import ProtocolError
from inferd.ipc.server.server import IncompleteFrames
from inferd.ipc.server.socket_connection import ArrivalTimer, Pause

pytestmark = pytest.mark.asyncio
ADA, BOB = 1, 2


class Sender:
    """A connection that only notes what is done to it."""

    def __init__(self, uid: int):
        self.uid = uid
        self.held = False
        self.error: Exception | None = None
        self.ended = anyio.Event()
        self.was_delayed = False

    def pause_reading(self, reason: Pause) -> None:
        self.held = True

    def resume_reading(self, reason: Pause) -> None:
        self.held = False

    def end(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


def begun(frames: IncompleteFrames, *uids: int, size: int = 10) -> list[Any]:
    """Let a connection of each user begin a frame."""
    senders: list[Any] = [Sender(uid) for uid in uids]
    for sender in senders:
        frames.begin_frame(sender, size)
    return senders


async def test_a_user_above_their_part_waits_and_others_do_not() -> None:
    frames = IncompleteFrames(bytes_max=100)
    adas = begun(frames, *[ADA] * 8)
    assert [sender.held for sender in adas] == [False] * 5 + [True] * 3

    [bob] = begun(frames, BOB)
    assert not bob.held
    assert frames.shares.total == 60


async def test_waiting_connections_continue_in_order_as_frames_end() -> None:
    frames = IncompleteFrames(bytes_max=100)
    senders = begun(frames, *[ADA] * 8)
    frames.end_frame(senders[0])
    assert [sender.held for sender in senders[5:]] == [False, True, True]
    frames.end_frame(senders[7])  # it has closed, and takes no place
    frames.end_frame(senders[1])
    frames.end_frame(senders[2])
    assert not senders[6].held

    for sender in senders:
        frames.end_frame(sender)
    assert frames.shares.total == 0


async def test_a_frame_counts_once_and_with_its_size_when_that_is_known() -> None:
    frames = IncompleteFrames(bytes_max=1000)
    [sender] = begun(frames, ADA, size=4)
    for _ in range(3):
        frames.begin_frame(sender, 300)
    assert frames.shares.total == 300
    frames.end_frame(sender)
    frames.end_frame(sender)
    assert frames.shares.total == 0


async def test_a_frame_that_does_not_end_ends_its_connection() -> None:
    frames = IncompleteFrames(seconds_max=0.01)
    [sender] = begun(frames, ADA)
    with anyio.fail_after(60):
        await sender.ended.wait()
    assert isinstance(sender.error, ProtocolError)
    assert "0.01 s" in sender.error.message


async def test_the_time_counts_for_each_frame_and_not_while_a_connection_waits() -> None:
    frames = IncompleteFrames(bytes_max=20, seconds_max=0.01)
    late, waiting, done = [*begun(frames, ADA, ADA), *begun(frames, BOB, size=1)]
    frames.end_frame(done)
    with anyio.fail_after(60):
        await late.ended.wait()
    assert waiting.error is None and done.error is None

    frames.end_frame(late)
    with anyio.fail_after(60):
        await waiting.ended.wait()


async def test_a_frame_that_the_daemon_delays_gets_more_time() -> None:
    frames = IncompleteFrames(seconds_max=0.05)
    [ada] = begun(frames, ADA)
    ada.was_delayed = True
    with anyio.move_on_after(0.07):
        await ada.ended.wait()
    assert ada.error is None
    with anyio.fail_after(60):
        await ada.ended.wait()


async def test_a_hello_that_the_daemon_delays_gets_more_time_and_a_missing_one_ends() -> None:
    ada: Any = Sender(ADA)
    ArrivalTimer(ada, 0.05, ProtocolError("no hello"))
    ada.was_delayed = True
    with anyio.move_on_after(0.07):
        await ada.ended.wait()
    assert ada.error is None
    with anyio.fail_after(60):
        await ada.ended.wait()
    in_time: Any = Sender(ADA)
    ArrivalTimer(in_time, 0.01, ProtocolError("no hello")).cancel()
    with anyio.move_on_after(0.03):
        await in_time.ended.wait()
    assert in_time.error is None

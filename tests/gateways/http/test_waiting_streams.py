"""The task that shows the streams that wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import anyio
import pytest

from inferd.gateways.http.exchange import Exchange, WaitingStreams
from inferd.gateways.http.exchange.streaming import StreamForm, _StreamWriter
from inferd.gateways.http.limits import PLACE_PAUSE_S, PLACES_PER_S_MAX, WAITING_PAUSE_S
from inferd.gateways.http.turns.answers import TurnRequest

pytestmark = pytest.mark.asyncio


class Stream:
    def __init__(self, *pauses_s: float):
        self._pauses_s = [*pauses_s, 0.0]
        self.shown = 0
        self.begun = anyio.Event()

    async def show_waiting(self) -> float:
        self.shown += 1
        pause_s = self._pauses_s.pop(0)
        if not pause_s:
            self.begun.set()
        return pause_s


async def test_streams_are_shown_until_they_have_begun() -> None:
    waiting, first, second = WaitingStreams(), Stream(0.001, 0.001), Stream()
    async with anyio.create_task_group() as group:
        group.start_soon(waiting.run)
        waiting.add(first.show_waiting, 0.001)
        waiting.add(second.show_waiting, 0.001)
        with anyio.fail_after(60):
            await first.begun.wait()
            await second.begun.wait()
        group.cancel_scope.cancel()
    assert (first.shown, second.shown) == (3, 1)


async def test_a_stream_that_is_due_earlier_than_the_others_does_not_wait_for_them() -> None:
    waiting, late, early = WaitingStreams(), Stream(), Stream()
    async with anyio.create_task_group() as group:
        group.start_soon(waiting.run)
        waiting.add(late.show_waiting, 3600)
        await anyio.wait_all_tasks_blocked()  # until the late one
        waiting.add(early.show_waiting, 0.001)
        with anyio.fail_after(60):
            await early.begun.wait()
        group.cancel_scope.cancel()
    assert late.shown == 0


async def test_all_streams_together_are_not_shown_more_often_than_allowed() -> None:
    waiting = WaitingStreams()
    for _ in range(3 * PLACES_PER_S_MAX):
        waiting.add(Stream().show_waiting, 3600)
    assert waiting.place_pause_s == 3


async def test_streams_send_their_comments_however_many_wait() -> None:
    waiting = WaitingStreams()
    for _ in range(100 * PLACES_PER_S_MAX):
        waiting.add(Stream().show_waiting, 3600)
    assert waiting.place_pause_s == WAITING_PAUSE_S


async def test_a_stream_whose_turn_is_not_accepted_does_not_wait_for_the_places_of_others() -> None:
    waiting = WaitingStreams()
    for _ in range(3 * PLACES_PER_S_MAX):
        waiting.add(Stream().show_waiting, 3600)
    exchange = cast("Exchange", SimpleNamespace(waiting=waiting))
    writer = _StreamWriter(
        exchange, cast("StreamForm", None), [TurnRequest(model="m", prompt="hi")]
    )
    writer._check_at = 0.0  # its check has begun
    assert await writer.show_waiting() == PLACE_PAUSE_S


async def test_a_check_that_fails_does_not_end_the_other_streams(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting, other = WaitingStreams(), Stream(0.001)

    async def check() -> None:
        raise ZeroDivisionError

    class Checked(Stream):
        async def show_waiting(self) -> float:
            waiting.start(check)
            return await super().show_waiting()

    checked = Checked()
    async with anyio.create_task_group() as group:
        group.start_soon(waiting.run)
        waiting.add(checked.show_waiting, 0.0)
        with anyio.fail_after(60):
            await checked.begun.wait()
            waiting.add(other.show_waiting, 0.001)
            await other.begun.wait()
        group.cancel_scope.cancel()
    assert "stream.check_failed" in caplog.text

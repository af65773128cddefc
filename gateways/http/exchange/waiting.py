"""The streams that wait for their first piece.

One task sends their places to all clients, because a task for each stream would take 4 kB of
memory.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeAlias

import anyio
import anyio.abc

from ..limits import PLACE_PAUSE_S, PLACES_PER_S_MAX, WAITING_PAUSE_S

log = logging.getLogger(__name__)
_TOGETHER_S = 0.02
"""Streams are shown again at multiples of this time, so that many are shown after one wait: a wait
takes longer than a stream that is shown.
"""


ShowWaiting: TypeAlias = Callable[[], Awaitable[float]]
"""Shows a client that its turn waits, unless the client does not read. It returns the seconds until
the next call, or 0 if the turn has begun.
"""


async def _run_check(check: Callable[[], Awaitable[None]]) -> None:
    try:
        await check()
    except Exception:  # all streams share this group; the daemon checks the turn too
        log.exception("stream.check_failed")


class WaitingStreams:
    """The streams that wait, in the order of the times at which they are shown next. They belong to
    the event loop.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, ShowWaiting]] = []
        self._numbers = count()
        self._earlier = anyio.Event()
        """Set when the first stream is due earlier than the task knows."""
        self._group: anyio.abc.TaskGroup | None = None

    @property
    def place_pause_s(self) -> float:
        """The least pause between two reports of a stream's place. It is no longer than the pause
        between two comments, by which clients and proxies notice that the stream has not ended.
        """
        return min(max(PLACE_PAUSE_S, len(self._due) / PLACES_PER_S_MAX), WAITING_PAUSE_S)

    def add(self, show: ShowWaiting, seconds: float) -> None:
        """Call *show* of a stream after *seconds*."""
        due = self._push(time.monotonic() + seconds, show)
        if self._due[0] is due:
            self._earlier.set()

    def _push(self, at: float, show: ShowWaiting) -> tuple[float, int, ShowWaiting]:
        due = (at, next(self._numbers), show)
        heapq.heappush(self._due, due)
        return due

    def start(self, check: Callable[[], Awaitable[None]]) -> None:
        """Run *check* beside the streams. Only a stream that is being shown calls it."""
        assert self._group is not None, "`run` shows the streams"
        self._group.start_soon(_run_check, check)

    async def run(self) -> None:
        """Show the streams when they are due, until cancelled."""
        async with anyio.create_task_group() as self._group:
            await self._show_streams()

    async def _show_streams(self) -> None:
        while True:
            self._earlier = anyio.Event()
            seconds = self._due[0][0] - time.monotonic() if self._due else float("inf")
            if seconds > 0:
                with anyio.move_on_after(seconds):
                    await self._earlier.wait()
                continue
            _, _, show = heapq.heappop(self._due)
            if again_s := await show():
                at = time.monotonic() + again_s
                self._push(math.ceil(at / _TOGETHER_S) * _TOGETHER_S, show)

"""Finds a worker that hangs: it has something to do and does not go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ..scheduler.recorder import Doing, Recorder

__all__ = ("Watch",)

LOOKS = 4
"""A worker is looked at so often within the time that it may be silent, while somebody waits."""


class Watch:
    """Calls *kill* once *is_awaited* and the worker was silent for *hang_s*. Lives on the daemon's
    event loop; without anybody who waits there is no timer.
    """

    def __init__(
        self,
        recorder: Recorder,
        hang_s: float,
        is_awaited: Callable[[], bool],
        kill: Callable[[], None],
    ):
        self._recorder, self._hang_s = recorder, hang_s
        self._is_awaited, self._kill = is_awaited, kill
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Note that the worker was sent something that it has to take."""
        self._sent_at = time.monotonic()
        if self._timer is None:
            self._arm()

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._hang_s / LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._is_awaited():
            return
        if self._hangs():
            self._kill()
        else:
            self._arm()

    def _hangs(self) -> bool:
        """Tell whether the worker is stuck in what it does, or does not take what it was sent."""
        act = self._recorder.read()
        limit = time.monotonic() - self._hang_s
        if act.doing is Doing.REST:
            return act.at < self._sent_at < limit
        return act.at < limit

"""The health of the daemon, for programs that check the gateway."""

from __future__ import annotations

import time

import anyio

from ....backends.errors import Busy, ConnectionLost, InferdError
from .pool import ConnectionPool

CHECK_PAUSE_S = 1.0
"""The age up to which a check serves further requests, because they need no key."""
ANSWER_S_MAX = 2.0
"""The time after which a daemon that does not answer counts as away."""


class DaemonHealth:
    """Whether the daemon answers. Lives on the event loop.

    Each check opens a connection of its own, because a pooled one waits for a daemon that restarts.
    """

    def __init__(self, pool: ConnectionPool):
        self._pool = pool
        self._lock = anyio.Lock()
        self._checked_at_s: float | None = None
        self._answers = False

    async def check(self) -> None:
        """Check that the daemon answers.

        :raises ConnectionLost: it does not.
        """
        async with self._lock:
            now, at_s = time.monotonic(), self._checked_at_s
            if at_s is None or now > at_s + CHECK_PAUSE_S:
                self._answers = await self._daemon_answers()
                self._checked_at_s = time.monotonic()
        if not self._answers:
            raise ConnectionLost(
                "the daemon does not answer",
                hint="it may be restarting; `inferd status` on its machine shows more",
            )

    async def _daemon_answers(self) -> bool:
        try:
            with anyio.fail_after(ANSWER_S_MAX):
                await self._pool.probe()
        except Busy:  # an answer, too
            return True
        except (TimeoutError, InferdError):
            return False
        return True

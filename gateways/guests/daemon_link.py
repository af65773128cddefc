"""A guest's connection to the daemon: new clients after a restart, and the guest's deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, TypeVar

import anyio

from ...backends.errors import ConnectionLost, InferdError, ShuttingDown, Timeout

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient

R = TypeVar("R")
CALL_S_MAX = 3600.0
"""The longest time of a call, also for a guest without a deadline."""
RECONNECT_S_MAX = 30.0
"""The time in which a daemon that restarts has to answer again."""
_PAUSE_S = 0.05


def guest_timeout(seconds: float) -> Timeout:
    """Return the error for a guest that has reached its deadline."""
    return Timeout(f"the guest ran longer than {seconds:g} s", hint="raise the guest's timeout")


class DaemonLink:
    """The client of one guest; a new one replaces it when its connection was lost.

    `generation` counts the clients, because a handle is valid for one client only. `exclusive` is
    held for steps that concurrent calls must not repeat: connecting, and opening graphs again.
    """

    exclusive: AbstractAsyncContextManager[object]

    def __init__(
        self,
        client: AsyncClient,
        connect: Callable[[], AsyncClient],
        timeout_s: float | None = None,
    ):
        self.client, self.generation, self.exclusive = client, 0, anyio.Lock()
        self._given, self._connect = client, connect
        self._guest_s_max = math.inf if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + self._guest_s_max

    @property
    def timeout_s(self) -> float:
        """The time that a call may take now.

        :raises Timeout: the guest's deadline has passed.
        """
        self.check_deadline()
        return min(CALL_S_MAX, max(0.001, self._deadline - time.monotonic()))

    def check_deadline(self) -> None:
        """Check that the guest may still run.

        :raises Timeout: the guest's deadline has passed.
        """
        if time.monotonic() >= self._deadline:
            raise guest_timeout(self._guest_s_max)

    async def call(self, action: Callable[[AsyncClient], Awaitable[R]]) -> R:
        """Return the result of *action*; repeat it with a new client when the connection was lost.

        :raises ConnectionLost: no daemon answered within `RECONNECT_S_MAX`.
        """
        until = 0.0
        while True:
            generation, began = self.generation, time.monotonic()
            try:
                return await action(self.client)
            except (ConnectionLost, ShuttingDown) as exc:
                lost = time.monotonic()
                if not until or lost - began > RECONNECT_S_MAX:
                    until = lost + RECONNECT_S_MAX
                async with self.exclusive:
                    if generation == self.generation:  # no other call has connected again
                        await self._reconnect(until, exc)

    async def _reconnect(self, until: float, cause: InferdError) -> None:
        """Wait until a daemon accepts a connection, as one that is shutting down still does.

        :raises InferdError: none did by the time *until*; the error is *cause*.
        """
        while True:
            self.check_deadline()
            if time.monotonic() >= until:
                raise cause
            await self.pause(_PAUSE_S)
            await self.close()
            self.client, self.generation = self._connect(), self.generation + 1
            with suppress(ConnectionLost, ShuttingDown):
                await self.client.open()
                return

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt to connect."""
        await anyio.sleep(seconds)

    async def close(self) -> None:
        """Close the client, unless it is the one that the caller passed."""
        if self.client is not self._given:
            with suppress(InferdError):
                await self.client.aclose()

"""Calls that block the guest's thread, under the interface of coroutines.

The calls of a guest are coroutines. Here their client is a blocking one, so that none of them ever
suspends; `run` steps a coroutine once to get its result, without an event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..guests import DaemonLink

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient, Client

R = TypeVar("R")


def run(call: Coroutine[Any, Any, R]) -> R:
    """Return the result of a call that never suspends."""
    try:
        call.send(None)
    except StopIteration as end:
        return cast("R", end.value)
    call.close()
    raise AssertionError("a blocking call has suspended")


class BlockingLink(DaemonLink):
    """The connection of a guest whose calls block its thread. Owned by that thread."""

    def __init__(self, client: Client, connect: Callable[[], Client], timeout_s: float | None):
        super().__init__(_as_async(client), lambda: _as_async(connect()), timeout_s)
        self.exclusive = nullcontext()

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt to connect."""
        _sleep(seconds)


_sleep = time.sleep  # no event loop waits for it


def _as_async(client: Client) -> AsyncClient:
    """Return the calls of *client* as the coroutines that it runs itself, which block and never
    suspend. Without the client's wrappers, a guest's token takes less time.
    """
    return client._asynchronous

"""Calls that block the guest's thread, under the interface of coroutines.

The calls of a guest are coroutines. Here their client is a blocking one, so that none of them ever
suspends: `run` steps a coroutine once, and has its result without an event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from ..guests import DaemonLink

if TYPE_CHECKING:
    from ...ipc.client import AsyncClient, Client, Stream

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
    """The connection of a guest whose calls block its thread, which owns it."""

    def __init__(self, client: Client, connect: Callable[[], Client], timeout_s: float | None):
        super().__init__(_as_async(client), lambda: _as_async(connect()), timeout_s)
        self.exclusive = nullcontext()

    async def pause(self, seconds: float) -> None:
        """Wait before the next attempt to connect."""
        _sleep(seconds)


_sleep = time.sleep  # no event loop waits for it


def _as_async(client: Client) -> AsyncClient:
    return cast("AsyncClient", _BlockingCalls(client))


class _BlockingCalls:
    """The methods of a `Client` as coroutines that block, and never suspend."""

    def __init__(self, client: Client):
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = getattr(self._client, "close" if name == "aclose" else name)

        async def call(*arguments: Any, **keywords: Any) -> Any:
            return method(*arguments, **keywords)

        return call

    def stream(self, context: int, **keywords: Any) -> _BlockingStream:
        return _BlockingStream(self._client.stream(context, **keywords))


class _BlockingStream(AsyncIterator[str], AbstractAsyncContextManager["_BlockingStream"]):
    def __init__(self, stream: Stream):
        self._stream = stream

    @property
    def metadata(self) -> Any:
        return self._stream.metadata

    async def __anext__(self) -> str:
        try:
            return next(self._stream)
        except StopIteration:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        self._stream.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)

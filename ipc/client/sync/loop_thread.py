"""The event loop of a synchronous client, in a separate thread."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from typing import Any, Generic, ParamSpec, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal

from ....backends.errors import ConnectionLost
from ..sessions.turns_under_way import calling_thread

P = ParamSpec("P")
R = TypeVar("R")


class LoopThread:
    """An event loop in a daemon thread; any other thread may call its methods.

    It leaves a notebook's running loop alone. After a fork the child process has the object but not
    the thread: calls then raise `ConnectionLost`.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal(name="inferd-client"))
        self._loop = self._portal.call(asyncio.get_running_loop)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the process that made the thread."""
        return os.getpid() != self._pid

    def run_call(
        self, function: Callable[P, Coroutine[Any, Any, R]], *args: P.args, **kw: P.kwargs
    ) -> R:
        """Run a coroutine function on the loop; interrupting the caller cancels it."""
        self._check_not_forked()
        call = _Call(functools.partial(function, *args, **kw))
        try:
            return self._spawn(call).result()
        except CancelledError:
            raise ConnectionLost("the client was closed", hint="open a new client") from None
        except BaseException:
            if not call.ended:  # Ctrl-C at any line here must end the call on the loop
                self.run_soon(call.cancel)
            raise

    def _spawn(self, call: _Call[R]) -> Future[R]:
        token = calling_thread.set(threading.get_ident())
        try:
            return self._portal.start_task_soon(call.run_in_scope)
        except RuntimeError as exc:
            raise ConnectionLost(
                f"the client cannot make calls now: {exc}",
                hint="the client is closed, or on_progress made a call; open a new client",
            ) from None
        finally:
            calling_thread.reset(token)

    def run_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Make the loop call *function* soon, without waiting for it."""
        if not self.forked:
            try:
                self._loop.call_soon_threadsafe(function, *args)
            except RuntimeError:
                return  # the loop is closed, and so are all its objects

    def _check_not_forked(self) -> None:
        if self.forked:
            raise ConnectionLost(
                f"this client was opened by process {self._pid}, before a fork: process"
                f" {os.getpid()} does not have its thread",
                hint="make a new Client in the child process",
            )

    def close(self) -> None:
        """End the loop and the thread."""
        if not self.forked:
            self._stack.close()


class _Call(Generic[R]):
    """A call on the loop, which can be cancelled even before it has begun there."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, R]]):
        self.ended = False
        self._function = function
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False

    async def run_in_scope(self) -> R:
        """Run the function in a cancel scope."""
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                return await self._function()
        finally:
            self.ended = True
        raise CancelledError

    def cancel(self) -> None:
        """Cancel the call; must be called on the loop."""
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()

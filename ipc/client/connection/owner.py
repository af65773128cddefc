"""The task that owns a client's connections, apart from the tasks that use the client."""

from __future__ import annotations

import asyncio

import anyio
import anyio.abc
from anyio.lowlevel import current_token

from .connecting import own_group


class ConnectionOwner:
    """A task with the group in which a client's connections run, until `aclose`.

    The task belongs to the event loop, so that any task may close the client, and a client that is
    never closed ends with the loop. A task group of the caller could be closed only by the
    caller's task.
    """

    group: anyio.abc.TaskGroup

    async def start(self) -> None:
        """Start the task."""
        self._started, self._closing, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._error: Exception | None = None
        loop = current_token().native_token
        if isinstance(loop, asyncio.AbstractEventLoop):
            self._task = loop.create_task(self._run())
        else:
            from trio.lowlevel import spawn_system_task

            spawn_system_task(self._run)
        await self._started.wait()

    async def _run(self) -> None:
        try:
            async with own_group() as self.group:
                self._started.set()
                await self._closing.wait()
        except Exception as exc:  # a bug of the client's, which `aclose` raises
            self._error = exc
        finally:
            self._ended.set()

    def close_soon(self) -> None:
        """End the task, without waiting."""
        self._closing.set()

    async def aclose(self) -> None:
        """End the task, and wait for its end."""
        self._closing.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        if self._error is not None:
            raise self._error

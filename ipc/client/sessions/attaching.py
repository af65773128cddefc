"""Where a session is: its lease on a model and its context, on one connection or the next."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING

import anyio
import msgspec

from ....backends.errors import (
    ConnectionLost,
    InferdError,
    InvalidArgument,
    SessionExpired,
    ShuttingDown,
)
from ...handles import Context, Graph
from ...payloads import Config, json_text
from ..connection.connection import Connection
from ..wasi_calls import ProgressCallback
from .resuming import Standing

if TYPE_CHECKING:
    from ..client import AsyncClient

__all__ = ("Attachment",)

CLOSE_S_MAX = 5.0
PAUSE_S = 0.05
PAUSE_S_MAX = 1.0
"""Between two tries to attach again: at first, and at last."""


class Attachment:
    """A session's graph and context, both None while it is not open, and their `connection`."""

    def __init__(
        self,
        client: AsyncClient,
        model: str,
        session_id: str | None,
        *,
        persist: bool = True,
        config: Config | None = None,
        on_progress: ProgressCallback | None = None,
    ):
        self.session_id = session_id
        self.graph: Graph | None = None
        self.context: Context | None = None
        self.connection: Connection | None = None
        self._client, self._model, self._persist = client, model, persist
        self._config, self._on_progress = config, on_progress
        self._leases = False
        self._lock = anyio.Lock()

    @property
    def lost(self) -> bool:
        """Whether the connection of graph and context is gone."""
        return self.connection is not None and self.connection.lost

    async def open(self) -> Context:
        """Lease the model and open the context; leave nothing behind where that fails."""
        client = self._client
        self.connection = client.connection
        try:
            self.graph = await client.load_by_name_with_config(
                self._model, json_text(self._config), on_progress=self._on_progress
            )
            self._leases = True
            if self.session_id is None:
                self.context = await client.init_execution_context(self.graph)
            else:
                self.context = await client.init_execution_context_with_session_id(
                    self.graph, self.session_id, persist=self._persist
                )
        except BaseException:
            await self.close()
            raise
        return self.context

    def branch(self, context: Context, session_id: str | None) -> Attachment:
        """Return that of a branch, which lives on this one's lease."""
        branch = Attachment(
            self._client, self._model, session_id, persist=self._persist, config=self._config
        )
        branch.graph, branch.context, branch.connection = self.graph, context, self.connection
        return branch

    async def close(self) -> None:
        """Close the context and end the lease; one with an id can be come back to."""
        context, graph = self.context, self.graph if self._leases else None
        self.context = self.graph = None
        self._leases = False
        with anyio.move_on_after(CLOSE_S_MAX, shield=True):
            if context is not None:
                await _ignore_refusal(self._client.finalize_execution_context(context, keep=True))
            if graph is not None:
                await _ignore_refusal(self._client.unload(graph, keep=True))

    async def renew(self, former: Connection, until: float) -> None:
        """Attach to the session over another connection than *former*, once that has ended; try
        *until* then.

        :raises InferdError: what the last try failed with.
        """
        async with self._lock:
            if self.connection is not former:
                return  # another task has done it
            error: InferdError = ConnectionLost(
                f"{self._client.path} was not connected to again in time",
                hint="raise resume_timeout, or see `inferd status`",
            )
            with anyio.move_on_after(until - time.monotonic()):
                await former.ended.wait()
                for pause_s in _pauses():
                    try:
                        return await self._open_anew()
                    except InferdError as exc:
                        if not (exc.retryable or self.lost or isinstance(exc, ConnectionLost)):
                            raise
                        error = exc
                    await anyio.sleep(pause_s)
            raise error

    async def _open_anew(self) -> None:
        await self._client.reconnect()
        try:
            await self.open()
        except ShuttingDown:  # a daemon that still answers; the next one listens after its end
            if self.connection is not None:
                await self.connection.ended.wait()
            raise

    async def standing(self) -> Standing:
        """Return how far the session is, as the daemon knows it."""
        listed = await self._client.sessions()
        for session in listed:
            if session["context"] == self.context:
                return Standing(session["turns"], session["tokens"])
        raise SessionExpired(f"the session {self.session_id!r} is not open any more")

    async def is_detached(self) -> bool:
        """Tell whether the session's last turn has no end."""
        assert self.context is not None, "it is asked of an open session"
        metadata = msgspec.json.decode(await self._client.get_output(self.context, 1))
        return bool(metadata["stop_reason"] == "detached")


def _pauses() -> Iterator[float]:
    pause_s = PAUSE_S
    while True:
        yield pause_s * random.uniform(1.0, 1.25)  # many sessions try at once
        pause_s = min(2 * pause_s, PAUSE_S_MAX)


async def _ignore_refusal(call: Awaitable[None]) -> None:
    """Await a call that tidies up: what is closed or lost already needs no closing."""
    try:
        await call
    except (InvalidArgument, SessionExpired, ConnectionLost, ShuttingDown):
        return

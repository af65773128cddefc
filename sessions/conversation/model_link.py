"""A session's exclusive access to its model, with a history in the model's vocabulary."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import anyio

from ...backends.errors import WorkerCrashed
from ..worker_client import WorkerClient, retry_query
from .core import SessionCore

T = TypeVar("T")


class ModelLink:
    """The access of a session to its model. Owned by its session."""

    def __init__(self, core: SessionCore):
        self._core = core
        self._lock = anyio.Lock()

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Wait until turns of the model are not held back, then lock the session."""
        while True:
            await self._core.model.released()
            async with self._lock:
                if not self._core.model.held:
                    yield
                    return

    async def query(
        self, query: Callable[[WorkerClient], Awaitable[T]], *, new_history: bool = False
    ) -> T:
        """Return the result of *query* on the worker; see `retry_query`.

        :raises WorkerCrashed: the query's input crashed the worker, or too many workers have died.
        """
        return await retry_query(lambda: self.client(new_history=new_history), query)

    async def client(self, *, new_history: bool = False) -> WorkerClient:
        """Return the worker client. A history whose tokens are of the model before a swap is
        retokenized, unless the caller replaces it by a *new_history*.
        """
        core = self._core
        client = await core.model.ready()
        at_rest = not core.active and core.conversation.size > 0
        other = core.conversation.vocabulary.differs_from(client.info)
        if other and at_rest and not new_history:
            history = core.conversation.current_history()
            texts = client.texts_of(core.requester)
            await core.conversation.vocabulary.retokenize(
                core.model, texts, history, core.requester
            )
            conversation = core.conversation  # another one, if it was rolled back meanwhile
            conversation.history_state.replace_history(history)
            conversation.last = replace(conversation.last, turn=None)
            core.recording.history_changed()
        core.conversation.vocabulary.set_model(client.info)
        return client

    async def prepare_migration(self, *, also_text: bool) -> None:
        """Wait until a call that uses the model before a swap has ended. With *also_text*, save the
        text of a history whose tokens are of that model.

        :raises InferdError: that model cannot detokenize it.
        """
        async with self._lock:
            core = self._core
            present, before = core.conversation, core.conversation.last.before
            for kept in (present,) if before is None else (present, before.conversation):
                if also_text and kept.size:
                    history = kept.current_history()
                    await kept.vocabulary.save_text(core.model, history, core.requester)

    async def count_cached_tokens(self) -> int:
        """Return how many of the history's tokens are in a KV state now."""
        core = self._core
        client = core.model.loaded
        if client is None:
            return 0
        tokens = core.conversation.tokens()
        try:
            return await client.count_cached_tokens(
                core.owner, core.name, core.settings.adapters, tokens
            )
        except WorkerCrashed:
            return 0

"""The embeddings that one worker's tasks wait for, and the answers to its requests for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from ...backends.errors import InferdError
from ...backends.media import MediaItem
from ...scheduler import messages as m
from ...scheduler.kv.store import SCOPE_ALL
from ...scheduler.owner import Requester
from ...sessions.worker_client import TaskReader
from .encoder import Embeddings, MediaEncoder, other_projector, unsupported_kind


class SendCommand(Protocol):
    """Sends a command, with a *descriptor* if that is not negative, which is closed once sent."""

    def __call__(self, command: m.Command, descriptor: int = -1) -> None: ...


class WantedMedia:
    """The requests of a worker's tasks by task and digest. Lives on the daemon's event loop.

    *send* sends commands to the worker. *changed* is called when a task begins to wait or has all
    that it waits for.
    """

    def __init__(self, send: SendCommand, changed: Callable[[], None]):
        self.encoder: MediaEncoder | None = None
        """The model's encoder, if it has one."""
        self._send, self._changed = send, changed
        self._wanted: dict[int, dict[bytes, anyio.CancelScope]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._wanted.values()))

    def is_awaited_by(self, task_id: int) -> bool:
        """Return whether a task waits for embeddings."""
        return task_id in self._wanted

    def want(self, reader: TaskReader, digests: Sequence[bytes], model: str) -> None:
        """Send embeddings to the worker as soon as they are there, for the task of *reader*."""
        spec = reader.spec
        items = {item.digest: item for item in spec.media}
        wanted = self._wanted.setdefault(spec.id, {})
        for digest in digests:
            item, encoder = items.get(digest), self.encoder
            if digest in wanted:
                continue
            if encoder is None:
                kind = "image" if item is None else item.content.kind
                self._fail(digest, unsupported_kind(model, kind))
            elif item is None:
                self._fail(digest, other_projector(model))
            else:
                scope = wanted[digest] = anyio.CancelScope()
                if not encoder.start_soon(self._answer, encoder, reader, item, scope):
                    del wanted[digest]  # the worker ends, too
        if not wanted:
            del self._wanted[spec.id]
        self._changed()

    def end_task(self, task_id: int) -> None:
        """Forget a task that has ended or left the worker."""
        for scope in self._wanted.pop(task_id, {}).values():
            scope.cancel()

    async def _answer(
        self,
        encoder: MediaEncoder,
        reader: TaskReader,
        item: MediaItem,
        scope: anyio.CancelScope,
    ) -> None:
        spec, found, error = reader.spec, None, None
        with scope:
            try:
                requester = Requester(spec.owner, spec.priority)
                found = await encoder.embeddings(requester, item, spec.id)
            except InferdError as exc:
                error = exc
        # No `await` from here on, or a descriptor could be left over.
        self._remove(spec.id, item.digest, scope)
        self._changed()  # first, so that the worker has its threads for the first step of the item
        if found is not None:
            self._pass_on(encoder, reader, item, found)
        elif error is not None:
            self._fail(item.digest, error, encoder.scope_of(spec.owner.user))

    def _pass_on(
        self, encoder: MediaEncoder, reader: TaskReader, item: MediaItem, found: Embeddings
    ) -> None:
        scope = encoder.scope_of(reader.spec.owner.user)
        self._send(m.MediaReady(item.digest, found.causal, scope), found.fd)
        if not found.cached:
            reader.media_encoded(1, found.seconds)

    def _fail(self, digest: bytes, error: InferdError, scope: int = SCOPE_ALL) -> None:
        self._send(m.MediaFailed(digest, error.to_wire(), scope))

    def _remove(self, task_id: int, digest: bytes, scope: anyio.CancelScope) -> None:
        wanted = self._wanted.get(task_id, {})
        if wanted.get(digest) is scope:
            del wanted[digest]
            if not wanted:
                del self._wanted[task_id]

"""Admission of requests to models that share memory. Lives on the daemon's event loop.

`advance` decides for all models in one step of the loop: it admits requests, lets loads proceed,
and evicts models for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Generic, TypeVar

import anyio

from ...backends.errors import InferdError
from .budget import MemoryBudget
from .residency import ResidencyRequest, ResidentModel

ADVANCE_S = 0.05
"""The interval of `advance` while a load waits for models that are in use."""

ModelT = TypeVar("ModelT", bound=ResidentModel)


class ResidencyGate(Generic[ModelT]):
    """Admits requests to *models*, which share the memory of *budget*.

    *start* runs work in the daemon's task group. `advance` and all methods that it calls are
    synchronous, which a test checks: at an `await`, the model of a request that was just admitted
    could be evicted.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        models: Callable[[], Iterable[ModelT]],
        residency_s: float,
        seconds: Callable[[], float],
        start: Callable[..., Any],
    ):
        self.residency_s = residency_s
        """The `Residency.residency_s` of all models."""
        self._budget, self._models = budget, models
        self._seconds, self._start = seconds, start
        self._keeps_advancing = False

    @property
    def waiting_requests(self) -> list[tuple[ModelT, ResidencyRequest]]:
        """The waiting requests in order, with their models."""
        now = self._seconds()
        found = [
            (model, request) for model in self._models() for request in model.residency.waiting
        ]
        return sorted(found, key=lambda pair: pair[1].order_key(now, self.residency_s))

    def refuse_requests(self, error: InferdError, subject: Any = None) -> bool:
        """Refuse the waiting requests for *subject* (None: all); return whether any waited."""
        found = [r for _, r in self.waiting_requests if subject is None or r.subject is subject]
        for request in found:
            request.refuse(error)
        return bool(found)

    @asynccontextmanager
    async def admit(
        self,
        model: ModelT,
        request: ResidencyRequest,
        on_progress: Callable[[float], None] | None = None,
    ) -> AsyncIterator[None]:
        """Wait until *model* is loaded and *request* is admitted. The model stays loaded in the
        `with` block.

        :raises LoadFailed: the model cannot be loaded.
        :raises Timeout: one of the request's timeouts has passed.
        """
        try:
            if model.loaded is not None and not self._budget.loads.has_waiting:
                # An `await` between this check and the admission would let the model be unloaded.
                model.residency.admit_request(request)
            else:
                await self._wait(model, request, on_progress)
            request.admitted_at = self._seconds()
            yield
        finally:
            self._end(model, request)

    @contextmanager
    def try_admit(self, model: ModelT, request: ResidencyRequest) -> Iterator[bool]:
        """Admit *request* to a loaded model if it need not wait; yield whether it was admitted."""
        try:
            if self._budget.loads.has_waiting:
                model.residency.queue_request(request, ())
                self.advance()
            else:
                model.residency.admit_request(request)
            yield request in model.residency.admitted
        finally:
            self._end(model, request)

    def _end(self, model: ModelT, request: ResidencyRequest) -> None:
        now = model.used_at = self._seconds()
        model.residency.end_request(request, now)
        if self._budget.loads.has_waiting:
            self.advance()

    async def _wait(
        self, model: ModelT, request: ResidencyRequest, on_progress: Callable[[float], None] | None
    ) -> None:
        waiting = model.residency.waiting
        model.residency.queue_request(request, [other.residency for other in self._models()])
        if model.loaded is not None:
            self.advance()
        if request not in waiting:
            return
        if request.listener is not None:
            request.listener.wait_begins()
        request.has_waited = True
        with request.limit_wait():
            while request in waiting:
                await model.released()
                await model.ready(on_progress)
                self.advance()
                if request in waiting:
                    await request.wait_woken()

    def note_worker_exited(self, model: ModelT) -> None:
        """Wake the requests for *model*, whose worker has exited, so that they load it again."""
        for request in model.residency.waiting:
            request.wake()
        self.advance()

    def advance(self) -> None:
        """Admit all admissible requests, and decide again on the waiting loads."""
        now = self._seconds()
        blocked, to_evict = self._budget.next_request(now)
        for model in self._models():
            if model.residency.waiting and model.loaded is not None:
                # No `await` until the loads are retried, which may evict models not in use.
                other = blocked if model.name in to_evict else None
                for request in model.residency.admit_waiting(other, now):
                    request.wake()
        self._budget.retry_waiting_loads(now)
        if self._budget.loads.has_waiting and not self._keeps_advancing:
            self._keeps_advancing = True
            self._start(self._keep_advancing)

    async def _keep_advancing(self) -> None:
        """Advance while a load waits, as no event reports absent readers or ended residencies."""
        try:
            while self._budget.loads.has_waiting:
                await anyio.sleep(ADVANCE_S)
                for _, request in self.waiting_requests:
                    if request.listener is not None:
                        request.listener.wait_continues()
                self.advance()
        finally:
            self._keeps_advancing = False

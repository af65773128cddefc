"""Leases of clients and sessions on models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from ...backends.errors import SessionExpired
from ...sessions import WorkerClient
from ...sessions.turns.sentence_comparison import Comparison, Similarity, compare_nothing
from ...sessions.worker_client import retry_query
from ..workers.process_client import ProcessClient
from .model import ManagedModel

T = TypeVar("T")


class Lease:
    """A lease on a model: a `sessions.ModelSource`. While it lasts, the model does not expire. The
    model may be evicted for another one, and is loaded again when needed.
    """

    def __init__(self, model: ManagedModel):
        self.model = model
        self.name = model.name
        self.closed = False
        model.leases.add(self)

    @property
    def loaded(self) -> ProcessClient | None:
        """The client of the model's worker, if the model is loaded."""
        worker = self.model.loaded
        return None if worker is None else worker.client

    @property
    def held(self) -> bool:
        """Whether a swap holds turns back."""
        return self.model.turns_held

    async def released(self) -> None:
        """Wait until turns may begin."""
        await self.model.released()

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> ProcessClient:
        """Return the client of the model's worker, loading the model if needed."""
        return await self.model.ready(on_progress)

    async def query(self, query: Callable[[ProcessClient], Awaitable[T]]) -> T:
        """Return the worker's answer; if the worker dies meanwhile, query another one.

        :raises WorkerCrashed: the query ended the worker, or too many workers have died.
        """
        return await retry_query(self.ready, query)

    def predecessor(self, vocabulary: str) -> ManagedModel | None:
        """Return the model that had the name before a swap and has this vocabulary hash."""
        return self.model.predecessors.get(vocabulary)

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        """Compare a sentence of the model's output, as the model is configured."""
        self.model.registry.compare_sentence(self.model, comparison, report)

    def close(self) -> None:
        """End the lease."""
        self.closed = True
        self.model.end_lease(self)


class DormantLease:
    """The `ModelSource` of a dormant session. *find_client* returns the client of the model's
    worker if the model is loaded.
    """

    held = False

    def __init__(self, name: str, find_client: Callable[[], WorkerClient | None]):
        self.name, self._find_client = name, find_client

    async def released(self) -> None:
        """Return at once: a dormant session has no turns."""

    @property
    def loaded(self) -> WorkerClient | None:
        """The client of the model's worker, if the model is loaded."""
        return self._find_client()

    def predecessor(self, vocabulary: str) -> None:
        """Return None: a dormant session migrates nothing."""

    async def ready(self) -> WorkerClient:
        """Raise `SessionExpired`: a dormant session computes nothing."""
        raise SessionExpired(f"the session is dormant and does not hold {self.name!r}")

    def compare(self, comparison: Comparison, report: Callable[[Similarity], None]) -> None:
        """Skip the comparison: a dormant session has no output."""
        compare_nothing(comparison, report)

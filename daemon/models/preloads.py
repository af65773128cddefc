"""Models that are loaded at the start, one after the other, while the daemon serves already."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing

import structlog

from ...backends.errors import InferdError, ShuttingDown
from ...scheduler.owner import Priority
from ..residency.residency import ResidencyRequest
from .loader import LoadListener
from .model import ManagedModel
from .registry import Lease, Registry

EVICTED = "it was unloaded for the others: together they do not fit into the memory"
log = structlog.get_logger()


class Preloads(LoadListener):
    """Loads the models *names*, with the lowest class. *note_state* gets the names that are not
    loaded with the causes, or None once all are. A failure is not fatal: requests load the model.

    Owned by the daemon's event loop.
    """

    def __init__(
        self, registry: Registry, names: Sequence[str], note_state: Callable[[str | None], None]
    ):
        self._registry, self._names, self._note_state = registry, names, note_state
        self._causes: dict[str, str] = {}
        """The causes of failures, by name."""

    async def run(self) -> None:
        """Load the models. Each keeps its lease until all were loaded, so that none expires before
        the last one; an idle one may still be evicted for the next.
        """
        loaded: list[Lease] = []
        with ExitStack() as leases:
            for name in self._names:
                try:
                    lease = self._registry.lease(name, os.getuid())
                    leases.enter_context(closing(lease))
                    await self._load(lease)
                except ShuttingDown:
                    return
                except InferdError as exc:
                    self._note_failure(name, exc.message)
                else:
                    loaded.append(lease)
            for lease in loaded:
                if lease.loaded is None:
                    self._note_failure(lease.name, EVICTED)

    async def _load(self, lease: Lease) -> None:
        registry = self._registry
        request = ResidencyRequest(Priority.LOW, registry.seconds(), user=os.getuid())
        async with registry.loader.admit(lease.model, request):
            await lease.ready()

    def _note_failure(self, name: str, cause: str) -> None:
        log.warning("model.preload_failed", model=name, cause=cause)
        self._causes[name] = cause
        self._report()

    def load_ended(self, model: ManagedModel, seconds: float | None) -> None:
        """Forget the failure of a model that a request has loaded now."""
        if seconds is None or not self._causes:
            return
        names = {model.name, *self._registry.catalog.other_names_of(model)}
        if found := names & self._causes.keys():
            for name in found:
                del self._causes[name]
            self._report()

    def _report(self) -> None:
        causes = [f"{name}: {cause}" for name, cause in self._causes.items()]
        self._note_state("; ".join(causes) or None)

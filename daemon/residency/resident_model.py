"""The part of a model that residency and the memory budget use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..workers.worker import Worker
from .residency import Residency


class ResidentModel(Protocol):
    """A model that shares the machine's memory with others; `models.ManagedModel` is the one."""

    name: str
    uid: int | None
    worker: Worker | None
    pinned: bool
    used_at: float
    load_s: float
    fitted: dict[str, int]
    load_waiters: int
    never_shrinks: bool
    residency: Residency

    @property
    def loaded(self) -> Worker | None:
        """Its worker, if it is ready."""

    @property
    def busy(self) -> bool:
        """Whether a client holds a lease or a task runs."""

    @property
    def has_tasks(self) -> bool:
        """Whether it has tasks."""

    @property
    def wanted_ctx_size(self) -> int:
        """The `ctx-size` that its first client asked for; 0: none."""

    @property
    def wanted_gpu_layers(self) -> int:
        """The `n-gpu-layers` that its first client asked for; -1: as many as fit."""

    def options(self) -> dict[str, Any]:
        """Return the configured parameters."""

    def evict(self) -> None:
        """Unload it for another model."""

    async def ready(self, on_progress: Callable[[float], None] | None = None) -> object:
        """Load the model if it is not loaded."""

    async def released(self) -> None:
        """Wait until turns may begin."""

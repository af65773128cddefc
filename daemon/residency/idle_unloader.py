"""Unloading of models that have not been used for their `keep_alive_s`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import anyio

from .residency import ResidentModel


class UnloadableModel(ResidentModel, Protocol):
    """A model that is unloaded once it has been idle for some time."""

    @property
    def keep_alive_s(self) -> float:
        """Seconds without use until the model is unloaded; if negative, it stays until evicted."""


class IdleUnloader:
    """Unloads models that were idle for their `keep_alive_s`. Lives on the daemon's event loop."""

    def __init__(
        self, models: Callable[[], Iterable[UnloadableModel]], seconds: Callable[[], float]
    ):
        self._models, self._seconds = models, seconds
        self._changed = anyio.Event()

    def note_change(self) -> None:
        """Check again soon, because a model's use or settings have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Unload idle models forever, without polling."""
        while True:
            now = self._seconds()
            wait_s = float("inf")
            for model in self._models():
                worker, keep_alive_s = model.worker, model.keep_alive_s
                if worker is None or model.busy or keep_alive_s < 0:
                    continue
                left_s = model.used_at + keep_alive_s - now
                if left_s > 0:
                    wait_s = min(wait_s, left_s)
                elif not worker.unloading:
                    worker.quit()
            self._changed = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._changed.wait()

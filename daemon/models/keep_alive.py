"""Models that are unloaded after they were idle for their `keep-alive`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from .model import ManagedModel


class IdleUnloader:
    """Unloads idle models. Lives on the daemon's event loop."""

    def __init__(self, models: Callable[[], Iterable[ManagedModel]], seconds: Callable[[], float]):
        self._models, self._seconds = models, seconds
        self._changed = anyio.Event()

    def note_change(self) -> None:
        """Note that a model's use or settings have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Unload models that were idle for their `keep_alive_s`, for ever, without polling."""
        while True:
            now = self._seconds()
            idle = [m for m in self._models() if m.worker is not None and not m.busy]
            ends = {m: m.used_at + m.keep_alive_s - now for m in idle if m.keep_alive_s >= 0}
            for model, left_s in ends.items():
                if left_s <= 0 and model.worker is not None and not model.worker.unloading:
                    model.worker.quit()
            self._changed = anyio.Event()
            coming = [left_s for left_s in ends.values() if left_s > 0]
            with anyio.move_on_after(min(coming, default=float("inf"))):
                await self._changed.wait()

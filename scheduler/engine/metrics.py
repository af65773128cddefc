"""The metrics of an engine: what it counts, and what it publishes of that."""

from __future__ import annotations

from ..kv.manager import KvManager
from ..recording.engine_counters import EngineCounters
from .task_table import EngineClock

_COUNTED = (
    *("generated", "prompt", "cached", "looked_up", "parks", "rows", "shifts", "kv_full"),
    "embedded",
)


class EngineMetrics:
    """Owned by the engine; *page* is what the daemon reads."""

    def __init__(self, kv: KvManager, clock: EngineClock, page: EngineCounters):
        self.page = page
        self.steps = 0
        self.counts = dict.fromkeys(_COUNTED, 0)
        self._kv, self._clock = kv, clock

    @property
    def due(self) -> bool:
        """Whether it is time for `publish`, if something is new."""
        return self._clock.now >= self.page.due_at

    def publish(self, *, at_once: bool = False) -> float | None:
        """Write the metrics to the page, now and then or *at_once*; return in how many seconds
        they are to be written again, or None where nothing is new.
        """
        changes = self._kv.search.changes
        due_s = self.page.due_in(self._clock.now, changes)
        if at_once or (due_s is not None and due_s <= 0):
            self.page.write(self._clock.now, changes, self.counts | self._gauges())
            return None
        return due_s

    def _gauges(self) -> dict[str, int]:
        slots, store = self._kv.slots, self._kv.store
        return {
            **{f"reused_{tier}": tokens for tier, tokens in self._kv.task_states.reused.items()},
            "restores": self._kv.task_states.restores,
            "fetches": self._kv.fetches,
            "over_target": self.page.over_target,
            "kv_bytes": store.bytes,
            "kv_entries": len(store),
            "slot_tokens": sum(task.computed for task in slots.tasks),
        }

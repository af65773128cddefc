"""Publication of an engine's metrics to the daemon; `recording.engine_metrics` declares them."""

from __future__ import annotations

from ..kv.manager import KvManager
from ..recording.engine_metrics import ENGINE_COUNTS, MetricsPage
from ..recording.recorder import Recorder
from .task_table import EngineClock


class MetricsPublisher:
    """Owned by the engine. The daemon reads `page` and `recorder`, in the memory behind the
    descriptor *record*. *target_s* is the time that a step with decoding tasks should not exceed.
    """

    def __init__(self, kv: KvManager, clock: EngineClock, record: int, target_s: float):
        self.page, self.recorder = MetricsPage(record, target_s), Recorder(record)
        self.steps = 0
        self.counts = dict.fromkeys((*ENGINE_COUNTS, "embedded"), 0)
        self._kv, self._clock = kv, clock

    def publish(self, *, at_once: bool = False) -> float | None:
        """Write the metrics if due, or *at_once*; else return the seconds until then, if any."""
        changes = self._kv.search.changes
        due_s = self.page.due_in(self._clock.now, changes)
        if at_once or (due_s is not None and due_s <= 0):
            self.page.write_page(self._clock.now, changes, self.counts | self._read_parts())
            return None
        return due_s

    def _read_parts(self) -> dict[str, int]:
        """Return the counters and gauges that other parts of the engine keep."""
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

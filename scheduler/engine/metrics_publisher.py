"""Publication of an engine's metrics to the daemon; `scheduler.record` declares them."""

from __future__ import annotations

from collections import Counter

from ..record import (
    ENGINE_COUNTS,
    TENSOR_COUNTS,
    TENSOR_GAUGES,
    MetricsPage,
    Recorder,
    WaitReason,
)
from ..waiting import wait_reason
from .task_table import TaskTable


class MetricsPublisher:
    """Owned by the engine. The daemon reads `page` and `recorder` in the shared memory behind the
    descriptor *record*.
    """

    def __init__(self, tasks: TaskTable, record: int):
        self.page = MetricsPage(record, tasks.settings.step_s_target)
        self.recorder = Recorder(record)
        self.steps = 0
        self.counts = dict.fromkeys((*ENGINE_COUNTS, *TENSOR_COUNTS, "embedded"), 0)
        self._tasks, self._kv, self._clock = tasks, tasks.kv, tasks.clock
        self._waiting = self._count_waiting()
        """The waiting tasks by reason, as the page has them."""

    def publish(self, *, at_once: bool = False) -> float | None:
        """Write the metrics if they are due, or *at_once*. Otherwise return the seconds until they
        are due, or None if they have not changed.
        """
        changes = self._kv.search.changes + self.counts["tuning_slices"]
        due_s = self.page.due_in(self._clock.now, changes)
        if due_s is None and self._count_waiting() != self._waiting:
            due_s = self.page.due_at - self._clock.now
        if at_once or (due_s is not None and due_s <= 0):
            self.page.write_page(self._clock.now, changes, self.counts | self._read_parts())
            return None
        return due_s

    def _read_parts(self) -> dict[str, int]:
        """Return the counters and gauges that other parts of the engine keep."""
        slots, store = self._kv.slots, self._kv.store
        checkpoints = store.checkpoints
        self._waiting = self._count_waiting()
        return {
            **{f"reused_{tier}": tokens for tier, tokens in self._kv.task_states.reused.items()},
            "restores": self._kv.task_states.restores,
            "fetches": self._kv.fetches,
            "over_target": self.page.over_target,
            "kv_bytes": store.bytes,
            "kv_entries": len(store),
            "kv_checkpoints": len(checkpoints),
            "kv_checkpoint_bytes": sum(len(entry.state) for entry in checkpoints),
            "slot_tokens": sum(task.computed for task in slots.tasks),
            **{f"waiting_{reason}": self._waiting[reason] for reason in WaitReason},
            **dict.fromkeys(TENSOR_GAUGES, 0),
        }

    def _count_waiting(self) -> Counter[WaitReason]:
        """Return the number of waiting and parked tasks by reason."""
        settings, now, tokens = self._tasks.settings, self._clock.now, self._clock.tokens
        return Counter(wait_reason(t, settings, now, tokens) for t in self._tasks.queue)

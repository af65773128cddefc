"""Running and waiting tasks in their order, with the estimated starts of those that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import messages as m
from ..policy.order import Order
from ..policy.slot_plan import reader_lags
from ..priority import Priority
from ..settings import EngineSettings
from ..task import Task
from .wait_estimate import QueuedTask, RemainingWork, StartEstimator, TurnEstimator

UNESTIMATED = -1
POSITION_PAUSE_S = 0.01
"""The pause between two reports of changed positions, for each waiting task beyond the first
`POSITIONS_AT_ONCE`. A report takes about 0.05 ms for each waiting task, while no step is computed.
"""
POSITIONS_AT_ONCE = 10


def subscribes(task: Task) -> bool:
    """Return whether the places of a waiting task are reported. While its grammar is not compiled
    yet, the task may still be refused.
    """
    return task.spec.watch and not task.preparing


class QueueView:
    """The queue at one moment. *estimator* has learned from the turns that have ended. For
    *reserved_after* see `StartEstimator`.
    """

    def __init__(
        self,
        running: Sequence[Task],
        queue: Sequence[Task],
        slots: int,
        order: Order,
        settings: EngineSettings,
        estimator: TurnEstimator,
        now: float,
        reserved_after: int,
    ):
        self._running, self._order, self._now = running, order, now
        self._slots, self._settings, self._estimator = slots, settings, estimator
        self._waiting = sorted(queue, key=order.key)
        self._reserved_after = reserved_after

    def _starts(self) -> list[float | None]:
        """Return the seconds until each waiting task gets a slot. They are None for a task that was
        parked by hand, or that waits for its reader or for KV space, because nothing bounds them.
        """
        bounded = [t for t in self._waiting if self._may_start(t)]
        estimator = StartEstimator(
            [self._queued(t) for t in self._running],
            [self._queued(t) for t in bounded],
            self._slots,
            self._estimator.token_times,
            self._settings,
            self._reserved_after,
        )
        starts = dict(zip(map(id, bounded), estimator.starts(), strict=True))
        return [starts.get(id(t)) for t in self._waiting]

    def _may_start(self, task: Task) -> bool:
        """Return whether *task* gets a slot in its order."""
        return (
            (task.has_work or task.wants_token)
            and not self._order.yields(task)
            and not task.preempted_by_kv_pressure
            and not reader_lags(task, self._settings, self._now)
        )

    def _queued(self, task: Task) -> QueuedTask:
        age, ageing = self._order.age(task), self._settings.ageing_tokens
        return QueuedTask(
            self._remaining(task),
            task.spec.priority,
            self._order.effective(task),
            rises_after=ageing - age % ageing,
            user=task.spec.owner.user,
            served=self._order.served(task),
            quantum=task.quantum,
            idle_s=self._now - task.computed_at,
            passed_over_s=self._now - task.passed_over_since,
        )

    def _remaining(self, task: Task) -> RemainingWork:
        prompt = max(0, task.prompt_size - task.computed - task.dropped)
        if task.spec.embed is not None:
            return RemainingWork(prompt, 0, 0)
        work = self._estimator.remaining_work(prompt, task.generated, task.spec.n_predict)
        if task.spec.ctx_shift:
            return work
        left = max(0, task.ctx_size - len(task.tokens))
        return RemainingWork(
            prompt, min(work.output_tokens, left), min(work.output_tokens_max, left)
        )

    def changed_positions(self) -> Iterator[m.Position]:
        """Yield the places that have changed since the last report, of tasks that subscribed."""
        changed = {
            i: t
            for i, t in enumerate(self._waiting)
            if subscribes(t) and t.reported_position != i + 1
        }
        starts = self._starts() if changed else []
        for i, task in changed.items():
            task.reported_position = i + 1
            yield m.Position(task.spec.id, i + 1, len(self._waiting), starts[i])

    def first_positions(self) -> Iterator[m.Position]:
        """Yield the places of tasks that subscribed and have no report yet, without the estimates,
        which take the most time.
        """
        for i, task in enumerate(self._waiting):
            if subscribes(task) and not task.reported_position:
                task.reported_position = UNESTIMATED
                yield m.Position(task.spec.id, i + 1, len(self._waiting), None)

    def entries(self) -> list[m.QueueEntry]:
        """Return the running tasks by slot, then the waiting ones in order."""
        starts = zip(self._waiting, self._starts(), strict=True)
        waiting = [self._entry(t, i, s) for i, (t, s) in enumerate(starts, 1)]
        return [self._entry(t, 0, 0.0) for t in self._running] + waiting

    def _entry(self, task: Task, position: int, starts_in_s: float | None) -> m.QueueEntry:
        return m.QueueEntry(
            task_id=task.spec.id,
            state=task.state.value,
            position=position,
            effective_priority=Priority(self._order.effective(task)),
            prompt_tokens=task.prompt_size,
            computed_tokens=task.computed,
            output_tokens=task.generated,
            waited_s=self._now - task.arrived_at,
            starts_in_s=starts_in_s,
        )

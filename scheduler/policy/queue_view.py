"""Running and waiting tasks in their order, with the estimated starts of those that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import messages as m
from ..priority import Priority
from ..task import Task
from .plan import Order
from .wait_estimate import RemainingWork, TurnEstimator, expected_starts


class QueueView:
    """The queue at one moment. *estimator* has learned from the turns that have ended."""

    def __init__(
        self,
        running: Sequence[Task],
        queue: Sequence[Task],
        slots: int,
        order: Order,
        estimator: TurnEstimator,
        now: float,
    ):
        self._running, self._order, self._now = running, order, now
        self._estimator = estimator
        self._waiting = sorted(queue, key=order.key)
        busy, waiting = map(self._remaining, running), map(self._remaining, self._waiting)
        self._starts = expected_starts([*busy], [*waiting], slots, estimator.token_times)

    def _remaining(self, task: Task) -> RemainingWork:
        prompt = max(0, task.prompt_size - task.computed - task.dropped)
        return self._estimator.remaining_work(prompt, task.generated, task.spec.n_predict)

    def changed_positions(self) -> Iterator[m.Position]:
        """Yield the places that have changed since the last report, of tasks that subscribed."""
        for position, task in enumerate(self._waiting, 1):
            if task.spec.watch and task.reported_position != position:
                task.reported_position = position
                starts_in_s = self._starts[position - 1]
                yield m.Position(task.spec.id, position, len(self._waiting), starts_in_s)

    def entries(self) -> list[m.QueueEntry]:
        """Return the running tasks by slot, then the waiting ones in order."""
        starts = zip(self._waiting, self._starts, strict=True)
        waiting = [self._entry(t, i, s) for i, (t, s) in enumerate(starts, 1)]
        return [self._entry(t, 0, 0.0) for t in self._running] + waiting

    def _entry(self, task: Task, position: int, starts_in_s: float) -> m.QueueEntry:
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

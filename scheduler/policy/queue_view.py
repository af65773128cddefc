"""Reports about the queue: the running and the waiting tasks, their order and expected starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import messages as m
from ..priority import Priority
from ..task import Task
from .plan import Order
from .wait_estimate import Pace, Work, expected_starts


class QueueView:
    """The queue at one moment. *pace* has learned from the turns that have ended."""

    def __init__(
        self,
        running: Sequence[Task],
        queue: Sequence[Task],
        slots: int,
        order: Order,
        pace: Pace,
        now: float,
    ):
        self._running, self._order, self._pace, self._now = running, order, pace, now
        self._waiting = sorted(queue, key=order.key)
        works = [self._left(t) for t in self._waiting]
        self._starts = expected_starts([self._left(t) for t in running], works, slots, pace.rates)

    def _left(self, task: Task) -> Work:
        prompt = max(0, task.prompt_size - task.computed - task.dropped)
        return self._pace.work(prompt, task.generated, task.spec.n_predict)

    def moved(self) -> Iterator[m.Position]:
        """Yield the places of the watched tasks that have changed since they were told."""
        for position, task in enumerate(self._waiting, 1):
            if task.spec.watch and task.position != position:
                task.position = position
                starts_in_s = self._starts[position - 1]
                yield m.Position(task.spec.id, position, len(self._waiting), starts_in_s)

    def entries(self) -> list[m.QueueEntry]:
        """Return all tasks: those that run by slot, those that wait in order."""
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
            waited_s=self._now - task.now,
            starts_in_s=starts_in_s,
        )

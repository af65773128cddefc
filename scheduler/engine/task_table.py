"""All tasks of an engine, from their submission to their end, and the order among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...backends import InferdError, Model
from ..embeddings.inputs import TextQueue
from ..kv.manager import KvManager
from ..limits import Limits
from ..output.stopping import Ending
from ..output.stopping.ending import TIME
from ..policy.plan import Order, OwnerClock
from ..policy.prefix_sharing import Leaders, prefix_hash_of
from ..policy.queue_view import QueueView
from ..policy.wait_estimate import Pace
from ..task import Task, TaskState
from .deadlines import deadlines, overdue, timeout
from .reporting import Reporter


class EngineClock:
    """The time of an engine. *now* advances only with an iteration and the end of its step."""

    def __init__(self, seconds: Callable[[], float]):
        self.read = seconds
        self.now = self.busy_at = seconds()
        """`busy_at` is when the last command came or the last step ended."""
        self.tokens = 0
        """Tokens computed so far: the time by which waiting tasks age."""

    def tick(self) -> None:
        """Let *now* be the present time."""
        self.now = self.read()


class TaskTable:
    """Owned by the engine. A task is in the queue, in a slot, or among the texts."""

    def __init__(self, model: Model, limits: Limits, clock: EngineClock, kv: KvManager):
        self.limits, self.clock = limits, clock
        self.kv, self.slots = kv, kv.slots
        self.reporter = Reporter(model)
        self.texts = TextQueue(model, limits)
        self.queue: list[Task] = []
        self.owners = OwnerClock()
        self.leaders = Leaders(
            model.info.memory,
            limits.shared_prefix_tokens_min,
            lambda origin, tokens: kv.search.find_source(origin, tokens).keep,
            lambda: kv.search.changes,
        )
        self._pace = Pace()
        self._by_id: dict[int, Task] = {}
        self._arrivals = 0

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_id.values())

    def find_task(self, task_id: int) -> Task | None:
        """Return the task with this id, if it has not ended."""
        return self._by_id.get(task_id)

    def order(self) -> Order:
        """Return the order of tasks as of now."""
        return Order(self.clock.tokens, self.owners, self.limits)

    def next_place(self) -> int:
        """Return a place behind all equals."""
        self._arrivals += 1
        return self._arrivals - 1

    def add_task(self, task: Task) -> None:
        """Take a task that was checked."""
        self.owners.arrive(task.spec.owner, (t.spec.owner for t in self))
        self._by_id[task.spec.id] = task
        self.reporter.log.queued(task)
        if task.spec.embed is not None:
            self.texts.add(task)
            return
        self.queue.append(task)
        task.prefix_hash = prefix_hash_of(task, self.limits.shared_prefix_tokens_min)

    def finish_task(self, task: Task, ending: Ending) -> None:
        """End a task well."""
        stats = self.reporter.finished(task, ending, self.clock.now)
        if task.spec.embed is None:
            self._pace.learn_length(stats.output_tokens, task.spec.n_predict)
            if not task.parks and task.spec.progressed is None:
                self._pace.learn_rates(
                    stats.prompt_tokens - stats.cached_tokens,
                    stats.prompt_ms / 1000,
                    stats.output_tokens,
                    stats.predicted_ms / 1000,
                )
        self._remove(task)

    def fail_task(self, task: Task, error: InferdError) -> None:
        """End a task with an error."""
        self.reporter.failed(task.spec, error)
        self._remove(task)

    def _remove(self, task: Task) -> None:
        del self._by_id[task.spec.id]
        if task.spec.embed is not None:
            self.texts.remove(task)
            return
        if task.slot >= 0:
            self.slots.end_lease(task)
        else:
            self.queue.remove(task)
            self.kv.task_states.drop_parked(task)
        for other in self.queue:
            other.preempted_by_kv_pressure = False
        self.leaders.forget(task)
        if task.sampler is not None:
            task.sampler.close()
            task.sampler = None

    def expire_tasks(self) -> None:
        """End the tasks whose time is up."""
        for task in list(self):
            error = timeout(task, self.limits, self.clock.now)
            if error is not None:
                self.fail_task(task, error)
            elif (bound := overdue(task, self.clock.now)) is not None:
                self.finish_task(task, Ending(TIME, bound))

    def deadlines(self) -> Iterator[float]:
        """Yield the moments to come at which something is to be done for a task."""
        now, waits = self.clock.now, bool(self.queue)
        for task in self:
            for moment in deadlines(task, self.limits, others_wait=waits):
                if moment > now:
                    yield moment
        for task in self.queue:
            if task.fetching and task.now + self.limits.fetch_timeout_s > now:
                yield task.now + self.limits.fetch_timeout_s

    def count_states(self) -> dict[str, int]:
        """Return how many tasks are in each state."""
        states = [task.state for task in self]
        return {state.value: states.count(state) for state in TaskState}

    def view_queue(self) -> QueueView:
        """Return the queue as of now."""
        texts = self.texts
        return QueueView(
            [*self.slots.tasks, *texts.running],
            [*self.queue, *texts.waiting],
            len(self.slots) + len(texts.running),
            self.order(),
            self._pace,
            self.clock.now,
        )

    def report_positions(self) -> None:
        """Report the places in the queue that have changed, to those who watch them."""
        if any(t.spec.watch for t in (*self.queue, *self.texts.waiting)):
            self.reporter.send_all(self.view_queue().moved())

    def check_integrity(self) -> None:
        """Assert the invariants: no task lost or doubled, no slot leaked, memory bounded."""
        places = [*self.slots.tasks, *self.queue, *self.texts.running, *self.texts.waiting]
        assert len(places) == len(self._by_id)
        assert {id(t) for t in places} == {id(t) for t in self}
        self.texts.check_integrity()
        self.kv.check_integrity({t.spec.id for t in self.queue if t.state is TaskState.PARKED})

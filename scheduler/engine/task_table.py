"""All tasks of an engine, from their submission to their end, with their order and deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ...backends import LanguageModel
from ...backends.encoder_prompts import encoded_size
from ...backends.errors import InferdError, ReaderTimeout, Timeout
from .. import messages as m
from ..embeddings import EmbeddingQueue
from ..kv.manager import KvManager
from ..owner import Owner, OwnerClock, Priority
from ..policy.batch_plan import ScheduledTokens, load_of
from ..policy.cost import StepCost
from ..policy.guarantees import NO_GUARANTEES, UserLags
from ..policy.order import Order, ReservedQuanta
from ..policy.slot_plan import Leaders, awaits_reader, prefix_hash_of, reader_lags
from ..settings import EngineSettings
from ..stopping import EMBEDDED, TIME, Ending
from ..task import Task, TaskState
from ..waiting import POSITION_PAUSE_S, POSITIONS_AT_ONCE, QueueView, TurnEstimator, subscribes
from .item_store import ItemStore
from .reporter import Reporter


def deadlines(task: Task, settings: EngineSettings, *, others_wait: bool) -> Iterator[float]:
    """Yield the moments, in the engine's seconds, at which *task* needs attention."""
    yield from (moment for moment, _, _ in _time_bounds(task, settings))
    if task.unread_since is not None and others_wait and task.state is TaskState.RUNNING:
        yield task.unread_since + settings.reader_lag_s


def expired_bound(task: Task, settings: EngineSettings, now: float) -> InferdError | Ending | None:
    """Return the error or the ending of a time bound that *task* has reached. The bounds on its own
    time end a task only after its last sentence was compared.
    """
    for moment, bound, described in _time_bounds(task, settings):
        if now >= moment:
            text = described()
            if bound == "reader":
                return ReaderTimeout(text)
            if bound in ("total", "queue"):
                return Timeout(text, data={"timeout": bound})
            if task.comparing_since is None:
                return Ending(TIME, text)
    return None


def _time_bounds(
    task: Task, settings: EngineSettings
) -> Iterator[tuple[float, str, Callable[[], str]]]:
    """Yield the time bounds of *task*: the moment at which the bound ends the task, its name, and
    a function that returns the error's message or the ending's detail.
    """
    spec, stopping, started = task.spec, task.spec.stopping, task.started_at
    if spec.total_timeout_s:
        moment = task.arrived_at + spec.total_timeout_s
        yield moment, "total", lambda: f"the timeout of {spec.total_timeout_s:g} s has passed"
    if spec.queue_timeout_s and started is None:
        moment = task.arrived_at + spec.queue_timeout_s
        yield moment, "queue", lambda: f"the queue timeout of {spec.queue_timeout_s:g} s has passed"
    if task.unread_since is not None:
        seconds = settings.reader_timeout_s
        moment = task.unread_since + seconds
        yield moment, "reader", lambda: f"the stream was not read for {seconds:g} s"
    if task.conditions is None or started is None:
        return
    # Bounds on its own time, which counts from its first slot, parked or not.
    if stopping.t_max_prompt_ms > 0 and task.prompt_done_at is None and not task.generated:
        moment = started + stopping.t_max_prompt_ms / 1000
        yield moment, "prompt", lambda: f"t-max-prompt-ms {stopping.t_max_prompt_ms}"
    if stopping.timeout_base_ms >= 0:
        tokens = task.prompt_size + task.generated
        limit_ms = stopping.timeout_base_ms + stopping.timeout_token_ms * tokens
        if stopping.timeout_max_ms >= 0:
            limit_ms = min(limit_ms, stopping.timeout_max_ms)
        yield started + limit_ms / 1000, "turn", lambda: f"timeout {limit_ms:.0f} ms"


class EngineClock:
    """The time of an engine. `now` advances only with an iteration and at the end of its step."""

    def __init__(self, seconds: Callable[[], float]):
        self.read, self.cpu = seconds, time.thread_time
        """`cpu` returns the CPU seconds of the engine's thread."""
        self.now = self.busy_at = seconds()
        """`busy_at` is when the last command arrived or the last step ended."""
        self.step_began = self.now
        """When the last step began. Commands that arrive during a step are noticed after it."""
        self.tokens = 0
        """Tokens computed so far: the time by which waiting tasks age."""


class TaskTable:
    """Owned by the engine. A task is in the queue, in a slot, or among the embeddings."""

    def __init__(
        self, model: LanguageModel, settings: EngineSettings, clock: EngineClock, kv: KvManager
    ):
        self.settings, self.clock = settings, clock
        self.kv, self.slots = kv, kv.slots
        self.reporter = Reporter(model)
        self.embeddings = EmbeddingQueue(model, settings)
        self.items = ItemStore(model.info, kv.search, settings.media_bytes_max)
        self.queue: list[Task] = []
        self.owners, self.reserved = OwnerClock(), ReservedQuanta(settings)
        self._lags = UserLags(strict=settings.priority_strict)
        self.guarantees = NO_GUARANTEES
        """The users' shares as of the last `update_guarantees`."""
        self.leaders = Leaders(kv.search, model.info.kv_kind, settings.shared_prefix_tokens_min)
        self._ctx_size, self._start_token = model.info.ctx_size, model.info.decoder_start_token
        self._estimator = TurnEstimator()
        self._by_id: dict[int, Task] = {}
        self._arrivals = 0
        self._positions_due = 0.0
        """The time from which changed places in the queue are reported."""

    def __iter__(self) -> Iterator[Task]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def find_task(self, task_id: int) -> Task | None:
        """Return the task with this id, unless it has ended."""
        return self._by_id.get(task_id)

    def order(self) -> Order:
        """Return the order of tasks as of now."""
        return Order(self.clock.tokens, self.owners, self.settings, self.guarantees)

    def update_guarantees(self, skipping: Collection[Task]) -> None:
        """Find the owners with work, which share the model's time. Tasks that were *skipping* the
        last step have none.
        """
        owners = {task.spec.owner for task in self._by_id.values()}
        classes: dict[Owner, int] = dict.fromkeys(owners, Priority.LOW) if len(owners) == 1 else {}
        if len(owners) > 1:
            for task in self:
                spec = task.spec
                if spec.priority <= classes.get(spec.owner, -1) or task in skipping:
                    continue
                if self._wants_time(task):
                    classes[spec.owner] = spec.priority
        self.guarantees = self._lags.shares(classes, self.clock.now)

    def _wants_time(self, task: Task) -> bool:
        if task.spec.embed is not None:
            return True
        waits = task.fetching or task.preparing or task.awaits_media
        able = not waits and not task.yields(self.clock.tokens)
        wants = task.has_work or task.wants_token
        return able and (wants or awaits_reader(task, self.settings, self.clock.now))

    def count_time(self, owner: Owner, seconds: float) -> None:
        """Count time of the engine's thread that was used for *owner*."""
        self._lags.count_work(self.guarantees, seconds, {owner: seconds})

    def count_step(self, batch: Sequence[ScheduledTokens], seconds: float, cost: StepCost) -> None:
        """Count the time of a step, which its tasks divide by tokens. Against its guarantee, each
        owner used what its own chunks would have taken alone.
        """
        token_s = seconds / max(1, sum(part.size for part in batch))
        for part in batch:
            part.task.compute_s += token_s * part.size
        if not self.guarantees.parts:
            return
        of_owner: dict[Owner, list[ScheduledTokens]] = {}
        for part in batch:
            of_owner.setdefault(part.task.spec.owner, []).append(part)
        if len(of_owner) == 1:
            used = dict.fromkeys(of_owner, seconds)
        else:
            whole = load_of(batch)
            used = {o: cost.alone_s(load_of(own), whole, seconds) for o, own in of_owner.items()}
        self._lags.count_work(self.guarantees, seconds, used)

    def busy_classes(self) -> dict[int, int]:
        """Return the users whose tasks compute, with their highest class."""
        order, found = self.order(), dict[int, int]()
        for task in (*self.slots.tasks, *self.embeddings.running):
            if task.has_work or (task.has_logits and task.wants_token):
                user = task.spec.owner.user
                found[user] = max(found.get(user, 0), order.effective(task))
        return found

    def next_queue_number(self) -> int:
        """Return a place behind all equals."""
        self._arrivals += 1
        return self._arrivals - 1

    def new_task(self, spec: m.TaskSpec) -> Task:
        """Return the task of *spec*, with a place behind its equals."""
        clock, shared = self.clock, self.settings.kv_shared
        task = Task.from_spec(
            spec, self.next_queue_number(), clock.tokens, clock.now, shared=shared
        )
        task.ctx_size = min(self._ctx_size, spec.ctx_size or self._ctx_size)
        if self._start_token is not None and spec.embed is None:
            task.items = {0: encoded_size(task.tokens, self._start_token)}
        return task

    def add_task(self, task: Task) -> None:
        """Queue a task that was checked."""
        self.owners.add_owner(task.spec.owner, (t.spec.owner for t in self))
        self._lags.set_account(task.spec.owner.user, task.spec.account)
        self._by_id[task.spec.id] = task
        self.reporter.log_queued(task)
        if task.spec.embed is not None:
            self.embeddings.waiting.append(task)
            return
        self.queue.append(task)
        if self._start_token is None:  # a part of an encoder's prompt is of no use to another
            task.prefix_hash = prefix_hash_of(task, self.settings.shared_prefix_tokens_min)

    def finish_task(self, task: Task, ending: Ending) -> None:
        """End a task without error."""
        stats = self.reporter.report_finished(task, ending, self.clock.now)
        if task.spec.embed is None:
            self._estimator.learn_length(
                stats.output_tokens,
                task.spec.n_predict,
                reasoning_tokens=stats.reasoning_tokens,
            )
            if not task.parks and task.spec.resume_point is None:
                computed = stats.prompt_tokens - stats.cached_tokens
                prompt_s, output_s = stats.prompt_ms / 1000, stats.predicted_ms / 1000
                self._estimator.learn_rates(computed, prompt_s, stats.output_tokens, output_s)
        self._remove_task(task)

    def finish_embedding(self, task: Task, embedded: m.Embedded) -> None:
        """Report the vectors of a text and end its task."""
        task.prompt_done_at = self.clock.now
        self.reporter.send(embedded)
        self.finish_task(task, Ending(EMBEDDED, embedded.pooling))

    def fail_task(self, task: Task, error: InferdError) -> None:
        """End a task with an error."""
        self.reporter.report_failed(task.spec, error)
        self._remove_task(task)

    def _remove_task(self, task: Task) -> None:
        del self._by_id[task.spec.id]
        if task.spec.embed is not None:
            self.embeddings.remove_text(task)
            return
        if task.slot >= 0:
            self.slots.release_slot(task)
        else:
            self.queue.remove(task)
            self.kv.task_states.drop_parked(task)
        for other in self.queue:
            other.preempted_by_kv_pressure = False
        self.leaders.forget_task(task)
        self.items.forget_task(task)
        if task.sampler is not None:
            task.sampler.close()
            task.sampler = None

    def expire_tasks(self) -> None:
        """End the tasks whose time is up."""
        for task in list(self):
            expired = expired_bound(task, self.settings, self.clock.now)
            if isinstance(expired, Ending):
                self.finish_task(task, expired)
            elif expired is not None:
                self.fail_task(task, expired)

    def deadlines(self) -> list[float]:
        """Return the future moments at which a task needs attention."""
        waits = bool(self.queue)
        found = [t.arrived_at + self.settings.fetch_timeout_s for t in self.queue if t.fetching]
        for task in self:
            found += deadlines(task, self.settings, others_wait=waits)
        if any(map(subscribes, self._all_waiting())):
            found.append(self._positions_due)
        return [moment for moment in found if moment > self.clock.now]

    def _all_waiting(self) -> list[Task]:
        return [*self.queue, *self.embeddings.waiting]

    def exchange_users(self, elsewhere: Mapping[int, int]) -> dict[int, int]:
        """Count tokens that other nodes have computed for users; see `OwnerClock` and
        `NodeTokens`.
        """
        working = (t.spec.owner for t in self if t.has_work)
        totals = self.owners.exchange_users(elsewhere, working, self.settings.ageing_tokens)
        self._lags.note_exchange(elsewhere, totals, self.clock.now)
        return totals

    def count_states(self) -> dict[str, int]:
        """Return how many tasks are in each state."""
        states = [task.state for task in self]
        return {state.value: states.count(state) for state in TaskState}

    def view_queue(self) -> QueueView:
        """Return the queue as of now."""
        texts = self.embeddings
        return QueueView(
            [*self.slots.tasks, *texts.running],
            self._all_waiting(),
            len(self.slots) + len(texts.running),
            self.order(),
            self.settings,
            self._estimator,
            self.clock.now,
            self.reserved.next_at - self.clock.tokens,
        )

    def plan_media(self) -> None:
        """Request the embeddings that tasks need, and free all others. Tasks that cannot compute
        them now come last, so that nobody waits for memory that they hold. A task whose state is
        still being read from disk may need fewer.
        """
        able = [t for t in self if t.media]
        if not able and not self.items:
            return
        needing = []
        for task in able:
            task.embeddings = {}
            if not task.fetching and (task.state is TaskState.WAITING or task.media_needed()):
                needing.append(task)
        key = self.order().key
        still = {task for task in needing if self._stands_still(task)}
        needing.sort(key=lambda task: (task in still, *key(task)))
        running = next((t for t in needing if t.slot >= 0 and t not in still), None)
        self.reporter.send(*self.items.plan_items(needing, running))

    def _stands_still(self, task: Task) -> bool:
        """Return whether *task* would compute nothing now if it had its embeddings."""
        unread = task.comparing_since is not None or not (task.credit or task.spec.pull)
        waits = task.preparing or (task.preempted_by_kv_pressure and bool(self.slots.tasks))
        lags = reader_lags(task, self.settings, self.clock.now)
        return unread or waits or lags or task.yields(self.clock.tokens)

    def free_media(self) -> None:
        """Free embeddings if no task has images or sounds. Otherwise `plan_media` does that."""
        if self.items and not any(task.media for task in self):
            self.items.plan_items(())

    def report_positions(self) -> None:
        """Report changed places in the queue for the tasks that subscribed to them, beside many
        tasks with a pause. Each task's first place is reported at once.
        """
        waiting = self._all_waiting()
        watching = [task for task in waiting if subscribes(task)]
        if watching and self.clock.now >= self._positions_due:
            changed = [*self.view_queue().changed_positions()]
            self.reporter.send(*changed)
            if changed and (more := len(waiting) - POSITIONS_AT_ONCE) > 0:
                self._positions_due = self.clock.now + more * POSITION_PAUSE_S
        elif any(not task.reported_position for task in watching):
            self.reporter.send(*self.view_queue().first_positions())

    def check_integrity(self) -> None:
        """Assert the invariants: no task lost or doubled, no slot leaked, memory bounded."""
        texts = self.embeddings
        places = [*self.slots.tasks, *self.queue, *texts.running, *texts.waiting]
        assert len(places) == len(self._by_id)
        assert {id(t) for t in places} == {id(t) for t in self}
        texts.check_integrity()
        self.kv.check_integrity({t.spec.id for t in self.queue if t.state is TaskState.PARKED})

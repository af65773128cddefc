"""The engine: one owner of queue, slots and KV state, driven turn by turn by one thread.

A turn: drain the inbox, plan, act (park, restore, decode once, sample), tell everything in one
frame. It knows no clock but the one it is given and no process, so a test drives it turn by turn;
`scheduler.worker` drives it in a process.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ..backends import Chunk, InferdError, Model
from ..backends.errors import BackendError, Cancelled, InvalidArgument, KvFull, PromptTooLong
from . import messages as m
from .cost import Load, StepCost
from .deadlines import deadlines, timeout
from .disk import DiskTier
from .drawing import Ending, draw
from .estimate import Pace, expected_starts
from .kv_files import KvFiles
from .leaders import Leaders, head_of
from .plan import Limits, Order, OwnerClock, Rows, plan_adapters, plan_rows, plan_slots
from .prompts import PromptDesk
from .slots import SlotTable
from .store import KvStore, Origin, scoped
from .task import Task, TaskState

__all__ = ("Engine",)

CLOSE_S = 10.0
"""What writing the KV states to disk may take when the engine ends."""


class Engine:
    """Runs tasks on one model. Nothing in here is shared: commands come in, reports go out."""

    def __init__(
        self,
        model: Model,
        limits: Limits | None = None,
        seconds: Callable[[], float] = time.monotonic,
        files: KvFiles | None = None,
    ):
        self.model = model
        self.limits = limits or Limits()
        self._seconds = seconds
        self._now = seconds()
        self.cost = StepCost()
        self.store = KvStore(self.limits.kv_ram_bytes, model.info.memory)
        self.disk = DiskTier(files, self.store, model.info.memory) if files is not None else None
        self.slots = SlotTable(model, self.store, self.cost.again)
        self.queue: list[Task] = []
        self.owners = OwnerClock()
        self.clock = 0
        """Tokens computed so far: the time by which waiting tasks age."""
        self.outbox: list[m.Report] = []
        self.quit = False
        self.steps = 0
        self._tasks: dict[int, Task] = {}
        self._arrivals = 0
        self._desk = PromptDesk(model)
        self._leaders = Leaders(
            model.info.memory, self.limits.share_tokens_min, lambda o, t: self.slots.find(o, t).keep
        )
        self._pace = Pace()
        self._adapters: tuple[str, ...] = ()
        self._adapter_rows = 0
        self._forgetting: deque[int] = deque()
        self._counters = dict.fromkeys(
            ("generated", "prompt", "cached", "parks", "rows", "shifts", "kv_full", "fetches"), 0
        )

    def __repr__(self) -> str:
        slots = f"slots: {len(self.slots.tasks)}/{len(self.slots)}"
        return f"<Engine [{slots} | queue: {len(self.queue)} | steps: {self.steps}]>"

    def turn(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Do one turn and return its reports, one frame's worth."""
        self._now = self._seconds()
        for command in commands:
            self._handle(command)
        self.outbox.extend(self._desk.work())
        self._poll_disk()
        self._expire()
        self._serve_readers()
        self._lease_slots()
        self._tell_positions()
        self._step()
        if self.disk is not None:
            self.disk.spill()
        self.store.evicted.clear()
        reports, self.outbox = self.outbox, []
        return reports

    def patience(self) -> float | None:
        """Return how long the next turn may wait for commands: seconds, or None for ever."""
        if self._lingering(now := self._seconds()):
            return self.limits.pull_linger_s
        if self._desk.busy or self._runnable():
            return 0
        waits = bool(self.queue)
        ends = [
            d
            for t in self._tasks.values()
            for d in deadlines(t, self.limits, others_wait=waits)
            if d > self._now
        ]
        return max(0.0, min(ends) - now) if ends else None

    def _runnable(self) -> bool:
        """Tell whether a turn without any command would compute something."""
        if any(t.has_work for t in self.slots.tasks):
            return True
        return bool(self.slots.idle) and any(
            t.has_work or t.wants_token for t in self._admissible()
        )

    def _lingering(self, now: float) -> bool:
        """Tell whether the next step waits a moment for pull readers that were just told a token:
        batches stay whole.
        """
        since = now - self.limits.pull_linger_s
        tasks = self.slots.tasks
        late = any(t.row and not t.wants_token and t.row_at > since for t in tasks)
        return late and any(t.has_work for t in tasks)

    def close(self) -> None:
        """Write the KV states that may be on disk there, for at most `CLOSE_S`, and end."""
        if self.disk is not None:
            self.slots.preserve_idle()
            self.disk.save_all(CLOSE_S)
            self.disk.close()

    # Commands.

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.Credit(task_id, events):
                self._credit(task_id, events)
            case m.Pull(task_id):
                self._pull(task_id)
            case m.Adjust():
                self._adjust(command)
            case m.Submit(spec):
                self._submit(spec)
            case m.Cancel(task_id):
                self._cancel(task_id)
            case m.Tokenize() | m.Detokenize() | m.ChatPrompt():
                self._desk.add(command)
            case m.Lookup() | m.Keep():
                self._look_up(command)
            case m.Forget():
                self._forget(command)
            case m.Threads(threads):
                self.model.set_threads(threads)
            case m.Queue(request):
                self.outbox.append(m.Answer(request, self._describe_queue()))
            case m.Stats(request):
                self.outbox.append(m.Answer(request, self.statistics()))
            case m.Quit():
                self.quit = True
            case _:
                raise AssertionError(f"no command of a loaded engine: {command}")

    def _submit(self, spec: m.TaskSpec) -> None:
        task = Task.from_spec(
            spec, self._arrivals, self.clock, self._now, shared=self.limits.kv_shared
        )
        self._arrivals += 1
        try:
            self._check(task)
        except InferdError as exc:
            self.outbox.append(m.Failed(spec.id, exc.to_wire()))
            return
        self.owners.arrive(spec.owner, (t.spec.owner for t in self._tasks.values()))
        self._tasks[spec.id] = task
        self.queue.append(task)
        task.head = head_of(task, self.limits.share_tokens_min)
        if spec.pull:
            task.asked = 1

    def _check(self, task: Task) -> None:
        info = self.model.info
        if not task.tokens:
            raise InvalidArgument("the prompt has no tokens", hint="send some text")
        ctx_size = self._ctx_size(task)
        if task.prompt_size >= ctx_size:
            raise PromptTooLong(
                f"the prompt has {task.prompt_size} tokens; the context takes {ctx_size - 1} and"
                " one to answer",
                data={"prompt_tokens": task.prompt_size, "ctx_size": ctx_size},
            )
        bad = next((t for t in task.tokens if not 0 <= t < info.vocab_size), None)
        if bad is not None:
            raise InvalidArgument(f"token {bad} is not in the vocabulary of {info.vocab_size}")
        if task.spec.adapters:
            self.model.set_adapters(task.spec.adapters)  # refuses what there is not
            self.model.set_adapters(self._adapters)

    def _ctx_size(self, task: Task) -> int:
        size = self.model.info.ctx_size
        return min(size, task.spec.ctx_size or size)

    def _credit(self, task_id: int, events: int) -> None:
        task = self._tasks.get(task_id)
        if task is not None and task.credit >= 0:
            task.credit = min(task.credit + events, self.limits.credit_max)
            task.unread_since = None

    def _pull(self, task_id: int) -> None:
        task = self._tasks.get(task_id)
        if task is not None:
            task.asked += 1
            task.unread_since = None

    def _adjust(self, command: m.Adjust) -> None:
        task = self._tasks.get(command.task_id)
        if task is None:
            return
        resample = task.sampler is not None and command.sampling != task.spec.sampling
        task.adjust(command)
        if resample:
            assert task.sampler is not None
            task.sampler.close()
            task.sampler = self.model.sampler(task.spec.sampling, task.tokens)

    def _cancel(self, task_id: int) -> None:
        task = self._tasks.get(task_id)
        if task is not None:
            self._fail(task, Cancelled("the turn was cancelled"))

    def _expire(self) -> None:
        for task in list(self._tasks.values()):
            error = timeout(task, self.limits, self._now)
            if error is not None:
                self._fail(task, error)

    # KV states.

    def _look_up(self, command: m.Lookup | m.Keep) -> None:
        """Answer how much of a history is here; with `Keep`, put it on disk, too."""
        shared = self.limits.kv_shared
        scope, session = scoped(command.owner, command.session, shared=shared)
        origin = Origin(scope, session, command.adapters, approximate=True)
        tokens = array("i", command.tokens)
        tokens.append(-1)  # the last token is never spared: here, all of the history can be
        if isinstance(command, m.Keep):
            kept = self._keep(origin, tokens)
        else:
            kept = self.slots.find(origin, tokens).keep
            if self.disk is not None:
                kept = max(kept, self.disk.find(origin, tokens, kept)[1])
        self.outbox.append(m.Answer(command.id, kept))

    def _keep(self, origin: Origin, tokens: array[int]) -> int:
        self.slots.preserve_idle(origin.scope, origin.session)
        entry, kept = self.store.find(origin, tokens)
        if entry is not None and self.disk is not None and self.disk.save(entry):
            return kept
        return self.disk.find(origin, tokens, 0)[1] if self.disk is not None else 0

    def _forget(self, command: m.Forget) -> None:
        scope, session = scoped(command.owner, command.session, shared=self.limits.kv_shared)
        self.slots.forget(scope, session)
        self.store.evicted.clear()
        if self.disk is None:
            self.outbox.append(m.Answer(command.id, None))
        else:
            self.disk.forget(scope, session)
            self._forgetting.append(command.id)

    def _poll_disk(self) -> None:
        if self.disk is None:
            return
        self.outbox.extend(self.disk.poll())
        done, self.disk.forgotten = self.disk.forgotten, 0
        self.outbox.extend(m.Answer(self._forgetting.popleft(), None) for _ in range(done))
        for task in self.queue:
            if not task.looked_up:
                task.looked_up = True
                self._fetch(task, self.disk)
            elif task.fetching and self._now >= task.now + self.limits.fetch_timeout_s:
                task.fetching = False

    def _fetch(self, task: Task, disk: DiskTier) -> None:
        """Have the state of a task that has just come read from disk, where it spares much."""
        tokens = array("i", task.tokens)
        here = self.slots.find(task.origin, tokens).keep
        file, keep = disk.find(task.origin, tokens, here)
        if file is not None and keep - here >= self.limits.share_tokens_min:
            disk.fetch(task, file)
            self._counters["fetches"] += task.fetching

    # Slots.

    def _order(self) -> Order:
        return Order(self.clock, self.owners, self.limits)

    def _admissible(self) -> list[Task]:
        """Return the waiting tasks but those that wait for a file, or for room in the KV cache."""
        full = bool(self.slots.tasks)
        return [t for t in self.queue if not t.fetching and not (t.crowded and full)]

    def _lease_slots(self) -> None:
        if self.queue:
            for task in self.slots.tasks:
                task.boost = 0
            order = self._order()
            plan = plan_slots(
                self._admissible(),
                self.slots.slots,
                order,
                self.limits,
                self._now,
                self._leaders.find,
            )
            for task in self.queue:
                task.follows = False
            for task, leader in plan.follow:
                task.follows = True
                leader.boost = max(leader.boost, order.effective(task))
            stayed = sum(not self._park(task) for task in plan.park)
            for task in plan.admit[: len(plan.admit) - stayed]:
                self._admit(task)
        self.slots.close_gaps()

    def _admit(self, task: Task) -> None:
        self.queue.remove(task)
        task.age += self.clock - task.clock_waiting
        task.quantum = 0
        task.crowded = False
        task.state = TaskState.RUNNING
        self._plan_stops(task)
        self.slots.admit(task)
        if task.admitted_at is None:
            task.admitted_at, task.cached = self._now, task.computed
            self._counters["cached"] += task.cached
        if task.sampler is None:
            task.sampler = self.model.sampler(task.spec.sampling, task.tokens)
        self.outbox.append(m.Moved(task.spec.id, task.state.value))

    def _plan_stops(self, task: Task) -> None:
        """Note where the state of a prompt is to be saved that serves only as a whole: where it
        parts from another, one token before its end, and every so often.
        """
        if self.model.info.memory == "plain" or task.admitted_at is not None:
            return
        size, every = task.prompt_size, self.limits.snapshot_tokens
        parting = self.slots.parting(task.origin, array("i", task.tokens))
        if self.limits.share_tokens_min <= parting < size:
            task.stops.add(parting)
        task.stops.update(range(every, size, every), {size - 1})

    def _park(self, task: Task, *, crowded: bool = False) -> bool:
        """Put a running task back into the queue; False if its state finds no room.

        A *crowded* one goes in any case, if need be without its state.
        """
        if not self.slots.park(task, anyhow=crowded):
            return False
        task.state, task.clock_waiting = TaskState.PARKED, self.clock
        task.parks += 1
        task.crowded = crowded
        self._counters["parks"] += 1
        self.queue.append(task)
        self.outbox.append(m.Moved(task.spec.id, task.state.value))
        return True

    # Steps.

    def _step(self) -> None:
        if self._lingering(self._now):
            return
        rows = self._plan_rows()
        if not rows:
            return
        self.slots.hold_rows({r.task.slot for r in rows})
        load = Load.of([(r.task.computed, r.count) for r in rows])
        started = self._seconds()
        try:
            self.model.step([self._chunk(r) for r in rows])
        except KvFull as exc:
            self._make_kv_room(rows, exc)
            return
        except BackendError as exc:
            self._step_failed(rows, exc)
            return
        self.steps += 1
        self._now = self._seconds()
        self.cost.learn(load, self._now - started)
        for row in rows:
            self._count(row)
        drawn = [r.task for r in rows if r.task.row]
        for task in drawn:
            task.row_at = self._now
        self._sample(drawn)

    def _plan_rows(self) -> list[Rows]:
        order = self._order()
        adapters = plan_adapters(
            self.slots.slots, order, self.limits, self._adapters, self._adapter_rows
        )
        if adapters != self._adapters:
            self.model.set_adapters(adapters)
            self._adapters, self._adapter_rows = adapters, 0
        for task in self.slots.tasks:
            if len(task.tokens) >= self._ctx_size(task) and task.has_work:
                self._shift(task)
        size = self.model.info.batch_size
        return plan_rows(self.slots.slots, order, self.limits, size, self.cost, adapters)

    def _chunk(self, row: Rows) -> Chunk:
        task, start = row.task, row.task.computed
        end = start + row.count
        return Chunk(task.slot, task.tokens[start:end], start, end == len(task.tokens))

    def _count(self, row: Rows) -> None:
        task = row.task
        prompt_left = max(0, task.prompt_size - task.computed - task.dropped)
        self._counters["prompt"] += min(row.count, prompt_left)
        task.computed += row.count
        task.quantum += row.count
        task.unsettled = False
        task.row = task.pending == 0
        self.clock += row.count
        self._adapter_rows += row.count
        self._counters["rows"] += row.count
        self.owners.add(task.spec.owner, row.count)
        if task.computed in task.stops:
            task.stops.discard(task.computed)
            self.slots.snapshot(task)

    def _step_failed(self, rows: list[Rows], error: BackendError) -> None:
        for row in rows:
            self.slots.clear(row.task)
            self._fail(row.task, error)

    def _make_kv_room(self, rows: list[Rows], error: KvFull) -> None:
        """Give up KV for the step that found no cells: idle KV first, then the last task's in the
        order of the queue. One that is alone and does not fit is refused.
        """
        self._counters["kv_full"] += 1
        for row in rows:  # the backend says that nothing has changed; what is there counts
            row.task.computed = self.model.trim(row.task.slot, row.task.computed)
        if self.slots.empty_idle():
            return
        tasks = self.slots.tasks
        last = max(tasks, key=self._order().key)
        if len(tasks) > 1:
            self._park(last, crowded=True)
        else:
            self._fail(last, error)

    # Context shift.

    def _may_shift(self, task: Task) -> bool:
        can = self.model.info.can_shift and task.spec.ctx_shift
        return can and task.shifts < self.limits.shifts_max

    def _shift(self, task: Task) -> None:
        """Let a full context drop old tokens, as llama-server does; the first one always stays."""
        ctx_size = self._ctx_size(task)
        keep = task.prompt_size if task.spec.n_keep < 0 else task.spec.n_keep
        keep = max(1, min(keep, ctx_size - 4))
        left = task.computed - keep
        discard = min(max(task.spec.n_discard or left // 2, 1), left - 1)
        if not self._may_shift(task) or left < 2:
            self._finish(task, Ending("context_full", str(ctx_size)))
            return
        try:
            self.model.shift(task.slot, keep, discard)
            task.computed -= discard
            task.shifted = task.unsettled = True
        except BackendError:  # cells are missing: the shortened text is computed again
            self.slots.clear(task)
        del task.tokens[keep : keep + discard]
        task.dropped += discard
        task.shifts += 1
        self._counters["shifts"] += 1
        self.outbox.append(m.Shifted(task.spec.id, keep, discard))

    # Answers.

    def _serve_readers(self) -> None:
        """Draw the tokens that pull readers have asked for since the last turn."""
        self._sample([t for t in self.slots.tasks if t.row])

    def _sample(self, tasks: list[Task]) -> None:
        for task in tasks:
            if task.prompt_done_at is None:
                task.prompt_done_at = self._now
            if task.spec.n_predict == 0:
                self._finish(task, Ending("length", "0"))
            elif task.wants_token:
                self._draw(task)
            elif task.unread_since is None:
                task.unread_since = self._now

    def _draw(self, task: Task) -> None:
        ctx_size = self._ctx_size(task)
        drawn = draw(self.model, task, ctx_size, may_shift=self._may_shift(task))
        self._counters["generated"] += 1
        if task.first_token_at is None:
            task.first_token_at = self._now
        if drawn.text is not None:
            self._tell(task, drawn.token, drawn.text)
        if drawn.ending is not None:
            self._finish(task, drawn.ending)

    def _tell(self, task: Task, token: int, text: bytes) -> None:
        self.outbox.append(m.Tokens(task.spec.id, [token], text))
        if task.spec.pull:
            task.asked -= 1
        elif task.credit > 0:
            task.credit -= 1
        if not task.wants_token:
            task.unread_since = self._now

    # Ends.

    def _finish(self, task: Task, ending: Ending) -> None:
        stats = task.stats(ending.reason, ending.detail, self._now)
        self.outbox.append(m.Finished(task.spec.id, task.text.flush(), ending.piece, stats))
        self._pace.learn_length(stats.output_tokens, task.spec.n_predict)
        if not task.parks:
            self._pace.learn_rates(
                stats.prompt_tokens - stats.cached_tokens,
                stats.prompt_ms / 1000,
                stats.output_tokens,
                stats.predicted_ms / 1000,
            )
        self._remove(task)

    def _fail(self, task: Task, error: InferdError) -> None:
        self.outbox.append(m.Failed(task.spec.id, error.to_wire()))
        self._remove(task)

    def _remove(self, task: Task) -> None:
        del self._tasks[task.spec.id]
        if task.slot >= 0:
            self.slots.give_back(task)
        else:
            self.queue.remove(task)
            self.slots.drop(task)
        for other in self.queue:
            other.crowded = False
        self._leaders.forget(task)
        if task.sampler is not None:
            task.sampler.close()
            task.sampler = None

    # What is told of the queue.

    def _in_order(self) -> list[tuple[Task, float]]:
        """Return the waiting tasks in the order of the queue, with the seconds until each is
        expected to get a slot.
        """
        waiting = sorted(self.queue, key=self._order().key)
        running = [self._work_left(t) for t in self.slots.tasks]
        works = [self._work_left(t) for t in waiting]
        starts = expected_starts(running, works, len(self.slots), self._pace.rates)
        return list(zip(waiting, starts, strict=True))

    def _work_left(self, task: Task) -> Any:
        prompt = max(0, task.prompt_size - task.computed - task.dropped)
        return self._pace.work(prompt, task.generated, task.spec.n_predict)

    def _tell_positions(self) -> None:
        if not any(t.spec.watch for t in self.queue):
            return
        for position, (task, starts_in_s) in enumerate(self._in_order(), 1):
            if task.spec.watch and task.position != position:
                task.position = position
                place = m.Position(task.spec.id, position, len(self.queue), starts_in_s)
                self.outbox.append(place)

    def _describe_queue(self) -> list[m.QueueEntry]:
        running = [self._entry(t, 0, 0.0) for t in self.slots.tasks]
        waiting = enumerate(self._in_order(), 1)
        return running + [self._entry(t, place, starts) for place, (t, starts) in waiting]

    def _entry(self, task: Task, position: int, starts_in_s: float) -> m.QueueEntry:
        return m.QueueEntry(
            task_id=task.spec.id,
            state=task.state.value,
            position=position,
            effective_priority=self._order().effective(task),
            prompt_tokens=task.prompt_size,
            computed_tokens=task.computed,
            output_tokens=task.generated,
            waited_s=self._now - task.now,
            starts_in_s=starts_in_s,
        )

    def check_integrity(self) -> None:
        """Assert the invariants: no task lost or doubled, no slot leaked, memory bounded."""
        leased = self.slots.tasks
        assert len(leased) + len(self.queue) == len(self._tasks)
        assert {id(t) for t in (*leased, *self.queue)} == {id(t) for t in self._tasks.values()}
        self.slots.check_integrity({t.spec.id for t in self.queue if t.state is TaskState.PARKED})

    def statistics(self) -> dict[str, Any]:
        """Return the counters since the start and what is here now."""
        states = [t.state for t in self._tasks.values()]
        disk = self.disk
        return {
            **self._counters,
            **{state.value: states.count(state) for state in TaskState},
            "steps": self.steps,
            "slots": len(self.slots),
            "kv_ram_bytes": self.store.bytes,
            "kv_ram_entries": len(self.store),
            "kv_disk_files": len(disk) if disk is not None else 0,
            "kv_disk_failures": disk.failures if disk is not None else 0,
            "kv_disk_cause": disk.cause if disk is not None else "",
        }

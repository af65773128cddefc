"""The engine: one owner of queue, slots and KV state, driven turn by turn by one thread.

A turn: drain the inbox, draw what readers ask for, plan, park and restore, tell; then decode once,
sample, tell; then what nobody waits for. It knows no clock but the one it is given and no process,
so a test drives it turn by turn; `scheduler.worker` drives it in a process.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from typing import Any

from ...backends import Chunk, InferdError, Model, Sampler, SamplingParams
from ...backends.errors import BackendError, Cancelled, KvFull
from .. import messages as m
from ..embeddings.inputs import TextDesk
from ..kv.disk import DiskTier
from ..kv.files import KvFiles
from ..kv.manager import KvDesk
from ..kv.slots import SlotTable
from ..kv.store import KvStore
from ..limits import Limits
from ..output.logprobs import likely
from ..output.sampling import draw, take_up
from ..output.similarity_check import ask, hear, is_asked
from ..output.stopping import Ending
from ..output.stopping.ending import CONTEXT_FULL, EMBEDDED, LENGTH, TIME
from ..policy.cost import Load, StepCost
from ..policy.embeddings_plan import embeds_next
from ..policy.groups import GroupTurn, plan_group
from ..policy.plan import (
    Order,
    OwnerClock,
    Rows,
    absent,
    plan_rows,
    plan_slots,
)
from ..policy.prefix_sharing import Leaders, head_of
from ..policy.queue_view import QueueView
from ..policy.wait_estimate import Pace
from ..recording.engine_counters import Figures
from ..recording.engine_log import EngineLog
from ..recording.recorder import Doing, Recorder
from ..task import BASE_GROUP, Task, TaskState
from .deadlines import deadlines, overdue, timeout
from .tokenizing import PromptDesk
from .validation import check_task, ctx_size_of
from .worker_adapters import add_adapter, in_use, uses

__all__ = ("Engine",)

REST_S = 0.25
"""Without a step or a command for so long, idle KV is saved: who goes on at once waits for none."""


class Engine:
    """Runs tasks on one model. Nothing in here is shared: commands come in, reports go out."""

    def __init__(
        self,
        model: Model,
        limits: Limits | None = None,
        seconds: Callable[[], float] = time.monotonic,
        files: KvFiles | None = None,
        recorder: Recorder | None = None,
        figures: Figures | None = None,
    ):
        self.model = model
        self.recorder = recorder or Recorder()
        self.limits = limits or Limits()
        self._figures = figures or Figures()
        self._figures.target_s = self.limits.step_target_s
        self._seconds = seconds
        self._now = seconds()
        self.cost = StepCost()
        self.store = KvStore(self.limits.kv_ram_bytes, model.info.memory)
        self.slots = SlotTable(model, self.store, self.cost.again)
        disk = DiskTier(files, self.store, model.info.memory) if files is not None else None
        self.kv = KvDesk(self.slots, self.store, disk, self.limits)
        self.texts = TextDesk(model, self.limits)
        self.queue: list[Task] = []
        self.owners = OwnerClock()
        self.clock = 0
        """Tokens computed so far: the time by which waiting tasks age."""
        self.outbox: list[m.Report] = []
        self.log = EngineLog(model, lambda said: self.outbox.append(said))
        self.quit = False
        self.steps = 0
        self._busy_at = self._now
        self._tasks: dict[int, Task] = {}
        self._arrivals = 0
        self._desk = PromptDesk(model, self.recorder)
        self._coming_at: float | None = None
        """When the first prompt after the last step was told whose task follows."""
        self._leaders = Leaders(
            model.info.memory,
            self.limits.share_tokens_min,
            lambda origin, tokens: self.slots.find(origin, tokens).keep,
            lambda: self.slots.changes,
        )
        self._pace = Pace()
        self._turn = GroupTurn()
        self._embedded = False
        """The last step was one of embeddings."""
        self._stepped: tuple[list[Rows], list[Chunk], float, list[Task]] | None = None
        """What is to be learned of the last step, see `_learn`."""
        self._counters = dict.fromkeys(
            (
                *("generated", "prompt", "cached", "looked_up", "parks", "rows", "shifts"),
                *("kv_full", "embedded"),
            ),
            0,
        )

    def __repr__(self) -> str:
        slots = f"slots: {len(self.slots.tasks)}/{len(self.slots)}"
        return f"<Engine [{slots} | queue: {len(self.queue)} | steps: {self.steps}]>"

    def turn(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Do one turn and return its reports."""
        reports = [*self.take(commands), *self.compute()]
        self.settle()
        return reports

    def take(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Begin a turn: do all but the step. What it tells waits for no step."""
        self._now = self._seconds()
        self.recorder.note(Doing.OTHER)
        for command in commands:
            self._busy_at = self._now
            self._handle(command)
        self.outbox.extend(self._desk.work())
        if self._desk.coming and self._coming_at is None:
            self._coming_at = self._now
        self.outbox.extend(self.kv.poll(self.queue, self._now))
        self._expire()
        self._serve_readers()
        self._lease_slots()
        self.outbox.extend(self.texts.take_up(self._order(), self.clock, self._now))
        self._tell_positions()
        return self._told()

    def compute(self) -> list[m.Report]:
        """Decode once, where there is something to decode, and draw."""
        self._step()
        return self._told()

    def settle(self) -> None:
        """End a turn: do what nobody waits for, while what was told is on its way."""
        if self._stepped is not None:
            self._learn(*self._stepped)
            self._stepped = None
        if self._now >= self._busy_at + REST_S and self._rests():
            self.slots.save_ahead()
        self.kv.spill()
        self.recorder.note(Doing.REST)

    def _told(self) -> list[m.Report]:
        reports, self.outbox = self.outbox, []
        return reports

    def patience(self) -> float | None:
        """Return how long the next turn may wait for commands: seconds, or None for ever."""
        if self._lingering(now := self._seconds()):
            return min(self.limits.pull_linger_s, self.limits.task_linger_s)
        if self._desk.busy or self._runnable():
            return 0
        waits = bool(self.queue)
        ends = [
            d
            for t in self._tasks.values()
            for d in deadlines(t, self.limits, others_wait=waits)
            if d > self._now
        ]
        if self.slots.unsaved is not None:
            ends.append(self._busy_at + REST_S)
        fetches = [t.now + self.limits.fetch_timeout_s for t in self.queue if t.fetching]
        ends += [end for end in fetches if end > self._now]
        return max(0.0, min(ends) - now) if ends else None

    def _rests(self) -> bool:
        """Tell whether there is nothing to do that anybody waits for."""
        return not (self._desk.busy or self._lingering(self._now) or self._runnable())

    def _runnable(self) -> bool:
        """Tell whether a turn without any command would compute something."""
        if self.texts.has_work or any(
            t.has_work or (t.row and t.wants_token) for t in self.slots.tasks
        ):
            return True
        return bool(self.slots.idle) and any(
            t.has_work or t.wants_token for t in self._admissible()
        )

    def _lingering(self, now: float) -> bool:
        """Tell whether the next step waits a moment: for tasks whose prompts were just told, or for
        pull readers that were just told a token, so that batches stay whole.
        """
        at = self._coming_at
        if self._desk.coming and at is not None and now < at + self.limits.task_linger_s:
            return True
        since = now - self.limits.pull_linger_s
        tasks = self.slots.tasks
        late = any(t.row and not t.wants_token and t.row_at > since for t in tasks)
        return late and any(t.has_work for t in tasks)

    def close(self) -> list[m.Report]:
        """Put the KV states on disk that may be there, and end; return what is to be told."""
        return self.kv.close()

    # Commands.

    def _handle(self, command: m.Command) -> None:
        match command:
            case m.Credit(task_id, events):
                self._credit(task_id, events)
            case m.Pull(task_id):
                self._pull(task_id)
            case m.Verdict():
                self._hear(command)
            case m.Adjust():
                self._adjust(command)
            case m.Submit(spec):
                self._submit(spec)
            case m.Cancel(task_id):
                self._cancel(task_id)
            case m.Park():
                self.outbox.append(self._give_way(command))
            case m.Tokenize() | m.Detokenize() | m.ChatPrompt():
                self._desk.add(command)
            case m.Lookup() | m.Keep():
                self.outbox.append(self.kv.look_up(command))
            case m.Forget():
                self.outbox.extend(self.kv.forget(command))
            case m.Evicted(name):
                self.kv.evicted(name)
            case m.AddAdapter():
                self.outbox.append(add_adapter(self.model, command))
            case m.RemoveAdapter():
                self.outbox.append(self._remove_adapter(command))
            case m.Logging():
                self.log.use(command)
            case m.Threads(threads):
                self.model.set_threads(threads)
                self.cost.use(threads)
            case m.Thrift():
                self.outbox.append(self.kv.be_thrifty(command))
            case m.Queue(request):
                self.outbox.append(m.Answer(request, self._view().entries()))
            case m.Stats(request):
                self.outbox.append(m.Answer(request, self.statistics()))
            case m.Quit():
                self.quit = True
            case _:
                raise AssertionError(f"no command of a loaded engine: {command}")

    def _submit(self, spec: m.TaskSpec) -> None:
        self._desk.coming = max(0, self._desk.coming - 1)
        task = Task.from_spec(
            spec, self._arrivals, self.clock, self._now, shared=self.limits.kv_shared
        )
        self._arrivals += 1
        task.ctx_size = ctx_size_of(spec, self.model)
        try:
            self._check(task)
        except InferdError as exc:
            self.log.failed(spec, exc)
            self.outbox.append(m.Failed(spec.id, exc.to_wire()))
            return
        self.owners.arrive(spec.owner, (t.spec.owner for t in self._tasks.values()))
        self._tasks[spec.id] = task
        self.log.queued(task)
        if spec.embed is not None:
            self.texts.add(task)
            return
        self.queue.append(task)
        task.head = head_of(task, self.limits.share_tokens_min)
        self._go_on(task, take_up(self.model, task))

    def _check(self, task: Task) -> None:
        check_task(task, self.model)
        if task.spec.embed is not None:
            return
        sampling = task.spec.sampling
        if sampling.logit_bias or sampling.follows:
            self.recorder.note(Doing.STEP, [task.spec.id])  # whom to blame if it ends the process
            self._sampler(task, sampling).close()  # refuses what cannot be
            self.recorder.note(Doing.OTHER)
        if task.spec.adapters:
            self.model.set_adapters(task.spec.adapters)  # refuses what there is not
            self.model.set_adapters(self._turn.group.adapters)

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

    def _hear(self, verdict: m.Verdict) -> None:
        task = self._tasks.get(verdict.task_id)
        if task is not None and is_asked(task, verdict):
            self._go_on(task, hear(task, verdict))

    def _go_on(self, task: Task, ending: Ending | None) -> None:
        """Let a task go on to its next token, or to its end, once its sentences are judged."""
        if task.text.question is not None:
            self.outbox.append(ask(task, ending, self._now))
        elif ending is not None:
            self._finish(task, ending)
        elif task.state is TaskState.WAITING and len(task.tokens) >= task.ctx_size:
            self._shift(task)  # the worker before was about to

    def _adjust(self, command: m.Adjust) -> None:
        task = self._tasks.get(command.task_id)
        if task is None:
            return
        if task.sampler is not None and command.sampling != task.spec.sampling:
            try:
                sampler = self._sampler(task, command.sampling)
            except InferdError as exc:
                self._fail(task, exc)
                return
            task.sampler.close()
            task.sampler = sampler
        task.adjust(command)

    def _sampler(self, task: Task, sampling: SamplingParams) -> Sampler:
        prompt, answer = task.said
        return self.model.sampler(sampling, prompt, answer)

    def _cancel(self, task_id: int) -> None:
        task = self._tasks.get(task_id)
        if task is not None:
            self._fail(task, Cancelled("the turn was cancelled"))

    def _give_way(self, command: m.Park) -> m.Answer:
        """Park a task by hand, or put it behind those who wait, if it is not alone."""
        task = self._tasks.get(command.task_id)
        if task is None or task.spec.embed is not None:
            return m.Answer(command.id, False)
        pressing = [t for t in self._pressing() if t is not task]
        if task.slot < 0:
            gives_way = bool(pressing)
        else:
            gives_way = len(pressing) > len(self.slots.idle) and self._park(task)
        if gives_way:
            task.yields_until = self.clock + self.limits.ageing_tokens
        return m.Answer(command.id, gives_way)

    def _remove_adapter(self, command: m.RemoveAdapter) -> m.Answer | m.Refused:
        adapter_id = command.adapter_id
        users = [t for t in self._tasks.values() if uses(t.spec.adapters, adapter_id)]
        if users and not command.force:
            return in_use(command, users)
        for task in users:
            self._fail(task, Cancelled("the adapter of the turn was removed"))
        if uses(self._turn.group.adapters, adapter_id):
            self._turn = self._turn.of(BASE_GROUP)
            self.model.set_adapters(())
        self.model.remove_adapter(adapter_id)
        return m.Answer(command.id, None)

    def _expire(self) -> None:
        for task in list(self._tasks.values()):
            error = timeout(task, self.limits, self._now)
            if error is not None:
                self._fail(task, error)
            elif (bound := overdue(task, self._now)) is not None:
                self._finish(task, Ending(TIME, bound))

    # Slots.

    def _order(self) -> Order:
        return Order(self.clock, self.owners, self.limits)

    def _admissible(self) -> list[Task]:
        """Return the waiting tasks that may get a slot: those that were parked by hand only where
        others leave one.
        """
        able = self._able()
        aside = [t for t in able if t.yields(self.clock)]
        if not aside:
            return able
        left = max(0, len(self.slots.idle) - len(self._pressing()))
        stay = sorted(aside, key=self._order().key)[left:]
        return [t for t in able if t not in stay]

    def _pressing(self) -> list[Task]:
        """Return the waiting tasks for which others that were parked by hand leave the slots."""
        able = [t for t in self._able() if not t.yields(self.clock)]
        return [t for t in able if t.has_work or t.wants_token]

    def _able(self) -> list[Task]:
        """Return the waiting tasks but those that wait for a file, for room in the KV cache, or
        for their reader to come back.
        """
        full = bool(self.slots.tasks)
        return [
            t
            for t in self.queue
            if not t.fetching and not (t.crowded and full) and not absent(t, self.limits, self._now)
        ]

    def _lease_slots(self) -> None:
        for task in self._tasks.values():
            task.boost = 0
        if self.queue:
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
        task.leased_at, task.begun_at = self._now, None
        task.crowded = False
        task.yields_until = 0
        task.state = TaskState.RUNNING
        self._plan_stops(task)
        self.slots.admit(task)
        if task.admitted_at is None:
            task.admitted_at, task.cached = self._now, task.computed
            self._counters["looked_up"] += len(task.tokens)
            self._counters["cached"] += task.cached
        if task.sampler is None:
            task.sampler = self._sampler(task, task.spec.sampling)
        self.outbox.append(m.Moved(task.spec.id, task.state.value))
        self.log.admitted(task)

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
        if task.quantum >= self.limits.quantum_tokens:
            task.place, self._arrivals = self._arrivals, self._arrivals + 1
        task.crowded = crowded
        self._counters["parks"] += 1
        self.queue.append(task)
        self.outbox.append(m.Moved(task.spec.id, task.state.value))
        self.log.parked(task)
        return True

    # Steps.

    def _step(self) -> None:
        if self._lingering(self._now):
            return
        self._desk.coming, self._coming_at = 0, None
        generating = [t for t in self.slots.tasks if t.has_work]
        passed_over = self._embedded
        self._embedded = bool(self.texts.running) and embeds_next(
            generating, self.texts.running, self._order(), embedded=self._embedded
        )
        if self._embedded:
            self._embed(
                [t for t in generating if not t.prefilling], generating if passed_over else []
            )
        else:
            self._generate([] if passed_over else self.texts.running)

    def _embed(self, decoding: list[Task], passed_over: list[Task]) -> None:
        """Compute a step of embeddings."""
        rows = self.texts.plan(self._order(), decoding, self.cost)
        load = Load.of([(r.task.computed, r.count) for r in rows])
        self.recorder.note(Doing.STEP, [r.task.spec.id for r in rows])
        started = self._seconds()
        try:
            done = self.texts.compute(rows)
        except InferdError as exc:
            self.log.step_failed([row.task for row in rows], exc)
            for row in rows:
                self._fail(row.task, exc)
            return
        self.steps += 1
        self._now = self._busy_at = self._seconds()
        self.texts.cost.learn(load, self._now - started)
        for row in rows:
            self.clock += row.count
            self._counters["embedded"] += row.count
            self.owners.add(row.task.spec.owner, row.count)
        self._age_others(rows, [*self.texts.running, *passed_over])
        for embedded in done:
            task = self._tasks[embedded.task_id]
            task.prompt_done_at = self._now
            self.outbox.append(embedded)
            stats = task.stats(EMBEDDED, embedded.pooling, self._now)
            self.log.finished(task, stats)
            self.outbox.append(m.Finished(task.spec.id, b"", b"", stats))
            self._remove(task)

    def _generate(self, passed_over: list[Task]) -> None:
        """Decode a batch, and draw tokens of what it leaves."""
        rows = self._plan_rows()
        if not rows:
            return
        self.slots.hold_rows({r.task.slot for r in rows})
        chunks = [self._chunk(r) for r in rows]
        self.recorder.note(Doing.STEP, [r.task.spec.id for r in rows])
        started = self._seconds()
        try:
            self.model.step(chunks)
        except KvFull as exc:
            self._make_kv_room(rows, exc)
            return
        except BackendError as exc:
            self._step_failed(rows, exc)
            return
        self.steps += 1
        self._now = self._busy_at = self._seconds()
        holders = [*self.slots.tasks, *passed_over]
        self._stepped = rows, chunks, self._now - started, holders
        for row in rows:
            self._count(row)
        drawn = [r.task for r in rows if r.task.row]
        for task in drawn:
            task.row_at = self._now
            if task.begun_at is None:
                task.begun_at = self._now
        self._sample(drawn)

    def _learn(
        self, rows: list[Rows], chunks: list[Chunk], seconds: float, holders: list[Task]
    ) -> None:
        """Learn of a step what it cost, whose turn it was, and who of *holders* had no row."""
        load = Load.of([(chunk.position, len(chunk.tokens)) for chunk in chunks])
        self.cost.learn(load, seconds)
        self._turn = self._turn.with_rows(load.rows)
        decodes = load.rows == len(rows) or any(row.count == 1 for row in rows)
        self._figures.step(load.rows, len(rows), seconds, decodes=decodes)
        self._age_others(rows, holders)

    def _plan_rows(self) -> list[Rows]:
        order = self._order()
        group = plan_group(self.slots.tasks, order, self.limits, self._turn)
        if group != self._turn.group:
            self.model.set_adapters(group.adapters)
            self._turn = self._turn.of(group)
        for task in self.slots.tasks:
            full = len(task.tokens) >= task.ctx_size
            if full and task.has_work and task.pending == 1:
                self._shift(task)
        size = self.model.info.batch_size
        return plan_rows(self.slots.slots, order, self.limits, size, self.cost, group)

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
        self._counters["rows"] += row.count
        self.owners.add(task.spec.owner, row.count)
        if task.computed in task.stops:
            task.stops.discard(task.computed)
            self.slots.snapshot(task)

    def _age_others(self, rows: list[Rows], holders: list[Task]) -> None:
        """Let those age that hold a slot and had no row in this step, like those who have none."""
        served = {id(r.task) for r in rows}
        computed = sum(r.count for r in rows)
        for task in holders:
            if task.has_work and id(task) not in served:
                task.age += computed

    def _step_failed(self, rows: list[Rows], error: BackendError) -> None:
        self.log.step_failed([row.task for row in rows], error)
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
        ctx_size = task.ctx_size
        keep = task.prompt_size if task.spec.n_keep < 0 else task.spec.n_keep
        keep = max(1, min(keep, ctx_size - 4))
        left = len(task.tokens) - 1 - keep
        discard = min(max(task.spec.n_discard or left // 2, 1), left - 1)
        if not self._may_shift(task) or left < 2:
            self._finish(task, Ending(CONTEXT_FULL, str(ctx_size)))
            return
        if task.slot >= 0:
            self._shift_slot(task, keep, discard)
        del task.tokens[keep : keep + discard]
        task.dropped += discard
        task.shifts += 1
        self._counters["shifts"] += 1
        self.outbox.append(m.Shifted(task.spec.id, keep, discard))

    def _shift_slot(self, task: Task, keep: int, discard: int) -> None:
        try:
            self.model.shift(task.slot, keep, discard)
            task.computed -= discard
            task.shifted = task.unsettled = True
        except BackendError:  # cells are missing: the shortened text is computed again
            self.slots.clear(task)

    # Answers.

    def _serve_readers(self) -> None:
        """Draw the tokens that pull readers have asked for since the last turn."""
        self._sample([t for t in self.slots.tasks if t.row])

    def _sample(self, tasks: list[Task]) -> None:
        for task in tasks:
            if task.prompt_done_at is None:
                task.prompt_done_at = self._now
            if task.spec.n_predict == 0:
                self._finish(task, Ending(LENGTH, "0"))
            elif task.wants_token:
                self._draw(task)
            elif task.unread_since is None:
                task.unread_since = self._now

    def _draw(self, task: Task) -> None:
        last = len(task.tokens) + 1 >= task.ctx_size and not self._may_shift(task)
        drawn = draw(self.model, task, self._now, last=last)
        self._counters["generated"] += 1
        if task.first_token_at is None:
            task.first_token_at = self._now
        if drawn.text is not None:
            self._tell(task, drawn.token, drawn.text, drawn.surprise)
        self._go_on(task, drawn.ending)

    def _tell(self, task: Task, token: int, text: bytes, surprise: float | None) -> None:
        told = likely(self.model, task)
        self.outbox.append(m.Tokens(task.spec.id, [token], text, surprise, told))
        if task.spec.pull:
            task.asked -= 1
        elif task.credit > 0:
            task.credit -= 1
        if not task.wants_token:
            task.unread_since = self._now

    # Ends.

    def _finish(self, task: Task, ending: Ending) -> None:
        stats = task.stats(ending.reason, ending.detail, self._now)
        self.log.finished(task, stats)
        self.outbox.append(m.Finished(task.spec.id, task.text.flush(), ending.piece, stats))
        self._pace.learn_length(stats.output_tokens, task.spec.n_predict)
        if not task.parks and task.spec.progressed is None:
            self._pace.learn_rates(
                stats.prompt_tokens - stats.cached_tokens,
                stats.prompt_ms / 1000,
                stats.output_tokens,
                stats.predicted_ms / 1000,
            )
        self._remove(task)

    def _fail(self, task: Task, error: InferdError) -> None:
        self.log.failed(task.spec, error)
        self.outbox.append(m.Failed(task.spec.id, error.to_wire()))
        self._remove(task)

    def _remove(self, task: Task) -> None:
        del self._tasks[task.spec.id]
        if task.spec.embed is not None:
            self.texts.remove(task)
            return
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

    def _tell_positions(self) -> None:
        if any(t.spec.watch for t in (*self.queue, *self.texts.waiting)):
            self.outbox.extend(self._view().moved())

    def _view(self) -> QueueView:
        texts = self.texts
        return QueueView(
            [*self.slots.tasks, *texts.running],
            [*self.queue, *texts.waiting],
            len(self.slots) + len(texts.running),
            self._order(),
            self._pace,
            self._now,
        )

    def check_integrity(self) -> None:
        """Assert the invariants: no task lost or doubled, no slot leaked, memory bounded."""
        places = [*self.slots.tasks, *self.queue, *self.texts.running, *self.texts.waiting]
        assert len(places) == len(self._tasks)
        assert {id(t) for t in places} == {id(t) for t in self._tasks.values()}
        self.texts.check_integrity()
        self.slots.check_integrity({t.spec.id for t in self.queue if t.state is TaskState.PARKED})

    @property
    def figures_due(self) -> bool:
        """Tell whether it is time for `tell_figures`, if something is new."""
        return self._now >= self._figures.due_at

    def tell_figures(self, *, at_once: bool = False) -> float | None:
        """Let the daemon see the figures, now and then or *at_once*; return in how many seconds it
        is to be done again, or None where nothing is new.
        """
        changes = self.slots.changes
        due_s = self._figures.due_in(self._now, changes)
        if at_once or (due_s is not None and due_s <= 0):
            self._figures.write(self._now, changes, self._counters | self._more_figures())
            return None
        return due_s

    def _more_figures(self) -> dict[str, int]:
        slots = self.slots
        return {
            **{f"reused_{tier}": tokens for tier, tokens in slots.reused.items()},
            "restores": slots.restores,
            "fetches": self.kv.fetches,
            "over_target": self._figures.over_target,
            "kv_bytes": self.store.bytes,
            "kv_entries": len(self.store),
            "slot_tokens": sum(task.computed for task in slots.tasks),
        }

    def statistics(self) -> dict[str, Any]:
        """Return the counters since the start and what is here now."""
        states = [t.state for t in self._tasks.values()]
        return {
            **self._counters,
            **{state.value: states.count(state) for state in TaskState},
            "steps": self.steps,
            "slots": len(self.slots),
            **self.kv.statistics(),
        }

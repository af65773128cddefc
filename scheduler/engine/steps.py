"""Steps: batches of tokens that the model computes, and what is learned of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...backends import Chunk, InferdError, Model
from ...backends.errors import BackendError, KvFull
from ..output.stopping import Ending
from ..output.stopping.ending import EMBEDDED
from ..policy.cost import Load, StepCost
from ..policy.embeddings_plan import embeds_next
from ..policy.groups import GroupTurn, plan_group
from ..policy.plan import Rows, plan_rows
from ..recording.recorder import Doing, Recorder
from ..task import Group, Task
from .answers import Answers
from .leasing import SlotLeases
from .metrics import EngineMetrics
from .task_table import TaskTable

__all__ = ("Steps",)


class _Computed(NamedTuple):
    """A step that was computed, of which nothing was learned yet; *holders* have a slot."""

    rows: list[Rows]
    chunks: list[Chunk]
    seconds: float
    holders: list[Task]


class Steps:
    """Decides what is computed next and has the model compute it. Owned by the engine."""

    def __init__(
        self,
        model: Model,
        tasks: TaskTable,
        leases: SlotLeases,
        answers: Answers,
        cost: StepCost,
        metrics: EngineMetrics,
        recorder: Recorder,
    ):
        self._model, self._tasks, self._leases, self._answers = model, tasks, leases, answers
        self._clock, self._slots, self._texts = tasks.clock, tasks.slots, tasks.texts
        self._cost, self._metrics, self._recorder = cost, metrics, recorder
        self._group_turn = GroupTurn()
        self._embedded = False
        """The last step was one of embeddings."""
        self._computed: _Computed | None = None

    @property
    def group(self) -> Group:
        """The group of the steps now: its adapters are set."""
        return self._group_turn.group

    def use_group(self, group: Group) -> None:
        """Compute for another group from the next step on."""
        self._model.set_adapters(group.adapters)
        self._group_turn = self._group_turn.of(group)

    def compute_step(self) -> None:
        """Compute one batch, of generations or of embeddings, where there is something to do."""
        generating = [t for t in self._slots.tasks if t.has_work]
        texts, passed_over = self._texts.running, self._embedded
        self._embedded = bool(texts) and embeds_next(
            generating, texts, self._tasks.order(), embedded=self._embedded
        )
        if self._embedded:
            decoding = [t for t in generating if not t.prefilling]
            self._embed(decoding, generating if passed_over else [])
        else:
            self._generate([] if passed_over else texts)

    def _embed(self, decoding: list[Task], passed_over: list[Task]) -> None:
        """Compute a step of embeddings."""
        rows = self._texts.plan(self._tasks.order(), decoding, self._cost)
        load = Load.of([(r.task.computed, r.count) for r in rows])
        self._recorder.note(Doing.STEP, [r.task.spec.id for r in rows])
        started = self._clock.read()
        try:
            done = self._texts.compute(rows)
        except InferdError as exc:
            self._fail_step(rows, exc)
            return
        seconds = self._end_step(started)
        self._texts.cost.learn(load, seconds)
        for row in rows:
            self._clock.tokens += row.count
            self._metrics.counts["embedded"] += row.count
            self._tasks.owners.add(row.task.spec.owner, row.count)
        self._age_others(rows, [*self._texts.running, *passed_over])
        for task, embedded in done:
            task.prompt_done_at = self._clock.now
            self._tasks.reporter.send(embedded)
            self._tasks.finish_task(task, Ending(EMBEDDED, embedded.pooling))

    def _generate(self, passed_over: list[Task]) -> None:
        """Decode a batch, and sample tokens of its logits."""
        rows = self._plan_rows()
        if not rows:
            return
        self._slots.hold_logits({r.task.slot for r in rows})
        chunks = [_chunk(r) for r in rows]
        self._recorder.note(Doing.STEP, [r.task.spec.id for r in rows])
        started = self._clock.read()
        try:
            self._model.step(chunks)
        except KvFull as exc:
            self._make_kv_room(rows, exc)
            return
        except BackendError as exc:
            for row in rows:
                self._slots.clear_task(row.task)
            self._fail_step(rows, exc)
            return
        seconds = self._end_step(started)
        holders = [*self._slots.tasks, *passed_over]
        self._computed = _Computed(rows, chunks, seconds, holders)
        for row in rows:
            self._count_tokens(row)
        now = self._clock.now
        with_logits = [r.task for r in rows if r.task.row]
        for task in with_logits:
            task.row_at = now
            if task.begun_at is None:
                task.begun_at = now
        self._answers.sample(with_logits)

    def _end_step(self, started: float) -> float:
        """Return what a step took that began at *started*."""
        self._metrics.steps += 1
        self._clock.tick()
        self._clock.busy_at = self._clock.now
        return self._clock.now - started

    def learn(self) -> None:
        """Learn of the last step what it cost, whose turn it was, and who had no token in it."""
        if self._computed is None:
            return
        rows, chunks, seconds, holders = self._computed
        self._computed = None
        load = Load.of([(chunk.position, len(chunk.tokens)) for chunk in chunks])
        self._cost.learn(load, seconds)
        self._group_turn = self._group_turn.with_rows(load.rows)
        decodes = load.rows == len(rows) or any(row.count == 1 for row in rows)
        self._metrics.page.step(load.rows, len(rows), seconds, decodes=decodes)
        self._age_others(rows, holders)

    def _plan_rows(self) -> list[Rows]:
        order, limits = self._tasks.order(), self._tasks.limits
        group = plan_group(self._slots.tasks, order, limits, self._group_turn)
        if group != self.group:
            self.use_group(group)
        for task in self._slots.tasks:
            full = len(task.tokens) >= task.ctx_size
            if full and task.has_work and task.pending == 1:
                self._answers.shift_context(task)
        size = self._model.info.batch_size
        return plan_rows(self._slots.slots, order, limits, size, self._cost, group)

    def _count_tokens(self, row: Rows) -> None:
        task, counts = row.task, self._metrics.counts
        prompt_left = max(0, task.prompt_size - task.computed - task.dropped)
        counts["prompt"] += min(row.count, prompt_left)
        task.computed += row.count
        task.quantum += row.count
        task.unsettled = False
        task.row = task.pending == 0
        self._clock.tokens += row.count
        counts["rows"] += row.count
        self._tasks.owners.add(task.spec.owner, row.count)
        if task.computed in task.stops:
            task.stops.discard(task.computed)
            self._tasks.kv.task_states.snapshot(task)

    def _age_others(self, rows: Sequence[Rows], holders: Sequence[Task]) -> None:
        """Age the *holders* that had no token in this step, like tasks without a slot."""
        served = {id(r.task) for r in rows}
        computed = sum(r.count for r in rows)
        for task in holders:
            if task.has_work and id(task) not in served:
                task.age += computed

    def _fail_step(self, rows: Sequence[Rows], error: InferdError) -> None:
        self._tasks.reporter.log.step_failed([row.task for row in rows], error)
        for row in rows:
            self._tasks.fail_task(row.task, error)

    def _make_kv_room(self, rows: Sequence[Rows], error: KvFull) -> None:
        """Give up KV for the step that found no cells: idle KV first, then the last task's in the
        order of the queue. One that is alone and does not fit is refused.
        """
        self._metrics.counts["kv_full"] += 1
        for row in rows:  # the backend says that nothing has changed; what is there counts
            row.task.computed = self._model.trim(row.task.slot, row.task.computed)
        if self._tasks.kv.idle.evict_all():
            return
        tasks = self._slots.tasks
        last = max(tasks, key=self._tasks.order().key)
        if len(tasks) > 1:
            self._leases.park_task(last, crowded=True)
        else:
            self._tasks.fail_task(last, error)


def _chunk(row: Rows) -> Chunk:
    task, start = row.task, row.task.computed
    end = start + row.count
    return Chunk(task.slot, task.tokens[start:end], start, end == len(task.tokens))

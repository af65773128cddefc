"""The engine: one owner of queue, slots and KV state, driven turn by turn by one thread.

A turn: drain the inbox, plan, act (park, restore, decode once, sample), tell everything in one
frame. It knows no clock but the one it is given and no process, so a test drives it turn by turn;
`scheduler.worker` drives it in a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..backends import Chunk, InferdError, Model
from ..backends.errors import (
    BackendError,
    Cancelled,
    InvalidArgument,
    PromptTooLong,
    ReaderTimeout,
    Timeout,
)
from . import messages as m
from .plan import (
    Limits,
    OwnerClock,
    Rows,
    plan_rows,
    plan_slots,
)
from .prompts import PromptDesk
from .slots import SlotTable
from .task import Task, TaskState

__all__ = ("Engine",)


class Engine:
    """Runs tasks on one model. Nothing in here is shared: commands come in, reports go out."""

    def __init__(
        self,
        model: Model,
        limits: Limits | None = None,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self.model = model
        self.limits = limits or Limits()
        self._seconds = seconds
        self._now = seconds()
        self.slots = SlotTable(model, self.limits.park_bytes_max)
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
        self._counters = dict.fromkeys(("generated", "prompt", "cached", "parks", "rows"), 0)

    def __repr__(self) -> str:
        slots = f"slots: {len(self.slots.tasks)}/{len(self.slots)}"
        return f"<Engine [{slots} | queue: {len(self.queue)} | steps: {self.steps}]>"

    def turn(self, commands: Iterable[m.Command]) -> list[m.Report]:
        """Do one turn and return its reports, one frame's worth."""
        self._now = self._seconds()
        for command in commands:
            self._handle(command)
        self.outbox.extend(self._desk.work())
        self._expire()
        self._serve_readers()
        self._lease_slots()
        self._step()
        reports, self.outbox = self.outbox, []
        return reports

    def patience(self) -> float | None:
        """Return how long the next turn may wait for commands: seconds, or None for ever."""
        if self._lingering(now := self._seconds()):
            return self.limits.pull_linger_s
        if self._desk.busy or self._runnable():
            return 0
        ends = [d for t in self._tasks.values() for d in self._deadlines(t) if d > self._now]
        return max(0.0, min(ends) - now) if ends else None

    def _runnable(self) -> bool:
        """Tell whether a turn without any command would compute something."""
        if any(t.has_work for t in self.slots.tasks):
            return True
        return self.slots.free and any(t.has_work or t.wants_token for t in self.queue)

    def _lingering(self, now: float) -> bool:
        """Tell whether the next step waits a moment for pull readers that were just told a token:
        batches stay whole.
        """
        since = now - self.limits.pull_linger_s
        tasks = self.slots.tasks
        late = any(t.row and not t.wants_token and t.row_at > since for t in tasks)
        return late and any(t.has_work for t in tasks)

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
            case m.Threads(threads):
                self.model.set_threads(threads)
            case m.Stats(request):
                self.outbox.append(m.Answer(request, self.statistics()))
            case m.Quit():
                self.quit = True
            case _:
                raise AssertionError(f"no command of a loaded engine: {command}")

    def _submit(self, spec: m.TaskSpec) -> None:
        task = Task.from_spec(spec, self._arrivals, self.clock, self._now)
        self._arrivals += 1
        try:
            self._check(task)
        except InferdError as exc:
            self.outbox.append(m.Failed(spec.id, exc.to_wire()))
            return
        self.owners.arrive(spec.owner, (t.spec.owner for t in self._tasks.values()))
        self._tasks[spec.id] = task
        self.queue.append(task)
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

    # Deadlines.

    def _deadlines(self, task: Task) -> Iterator[float]:
        spec = task.spec
        if spec.total_timeout_s:
            yield task.now + spec.total_timeout_s
        if spec.queue_timeout_s and task.admitted_at is None:
            yield task.now + spec.queue_timeout_s
        if task.unread_since is not None:
            yield task.unread_since + self.limits.reader_timeout_s
            if self.queue and task.state is TaskState.RUNNING:
                yield task.unread_since + self.limits.reader_wait_s

    def _expire(self) -> None:
        now = self._now
        for task in [t for t in self._tasks.values() if any(d <= now for d in self._deadlines(t))]:
            error = self._timeout(task)
            if error is not None:
                self._fail(task, error)

    def _timeout(self, task: Task) -> Timeout | None:
        """Return the timeout that has passed for *task*, if one has."""
        spec, now = task.spec, self._now
        if spec.total_timeout_s and now >= task.now + spec.total_timeout_s:
            text = f"the timeout of {spec.total_timeout_s:g} s has passed"
            return Timeout(text, data={"timeout": "total"})
        waits = task.admitted_at is None
        if waits and spec.queue_timeout_s and now >= task.now + spec.queue_timeout_s:
            text = f"the queue timeout of {spec.queue_timeout_s:g} s has passed"
            return Timeout(text, data={"timeout": "queue"})
        limit = self.limits.reader_timeout_s
        if task.unread_since is not None and now >= task.unread_since + limit:
            return ReaderTimeout(f"nobody has read the stream for {limit:g} s")
        return None

    # Slots.

    def _lease_slots(self) -> None:
        if self.queue:
            plan = plan_slots(
                self.queue, self.slots.slots, self.owners, self.clock, self.limits, self._now
            )
            stayed = sum(not self._park(task) for task in plan.park)
            for task in plan.admit[: len(plan.admit) - stayed]:
                self._admit(task)
        self.slots.close_gaps()

    def _admit(self, task: Task) -> None:
        self.queue.remove(task)
        task.age += self.clock - task.clock_waiting
        task.quantum = 0
        task.state = TaskState.RUNNING
        self.slots.admit(task)
        if task.admitted_at is None:
            task.admitted_at, task.cached = self._now, task.computed
            self._counters["cached"] += task.cached
        if task.sampler is None:
            task.sampler = self.model.sampler(task.spec.sampling, task.tokens)
        self.outbox.append(m.Moved(task.spec.id, task.state.value))

    def _park(self, task: Task) -> bool:
        """Put a running task back into the queue; False if its state finds no room."""
        if not self.slots.park(task, self.clock):
            return False
        task.state, task.clock_waiting = TaskState.PARKED, self.clock
        task.parks += 1
        self._counters["parks"] += 1
        self.queue.append(task)
        self.outbox.append(m.Moved(task.spec.id, task.state.value))
        return True

    # Steps.

    def _step(self) -> None:
        if self._lingering(self._now):
            return
        rows = plan_rows(
            self.slots.slots, self.owners, self.clock, self.limits, self.model.info.batch_size
        )
        if not rows:
            return
        self.slots.hold_rows({r.task.slot for r in rows})
        try:
            self.model.step([self._chunk(r) for r in rows])
        except BackendError as exc:
            self._step_failed(rows, exc)
            return
        self.steps += 1
        for row in rows:
            self._count(row)
        self._now = self._seconds()
        drawn = [r.task for r in rows if r.task.row]
        for task in drawn:
            task.row_at = self._now
        self._sample(drawn)

    def _chunk(self, row: Rows) -> Chunk:
        task, start = row.task, row.task.computed
        end = start + row.count
        return Chunk(task.slot, task.tokens[start:end], start, end == len(task.tokens))

    def _count(self, row: Rows) -> None:
        task = row.task
        prompt_left = max(0, task.prompt_size - task.computed)
        self._counters["prompt"] += min(row.count, prompt_left)
        task.computed += row.count
        task.quantum += row.count
        task.row = task.pending == 0
        self.clock += row.count
        self._counters["rows"] += row.count
        self.owners.add(task.spec.owner, row.count)

    def _step_failed(self, rows: list[Rows], error: BackendError) -> None:
        for row in rows:
            self.slots.clear(row.task)
            self._fail(row.task, error)

    def _serve_readers(self) -> None:
        """Draw the tokens that pull readers have asked for since the last turn."""
        self._sample([t for t in self.slots.tasks if t.row])

    def _sample(self, tasks: list[Task]) -> None:
        for task in tasks:
            if task.prompt_done_at is None:
                task.prompt_done_at = self._now
            if task.spec.n_predict == 0:
                self._finish(task, "length", "0")
            elif task.wants_token:
                self._draw(task)
            elif task.unread_since is None:
                task.unread_since = self._now

    def _draw(self, task: Task) -> None:
        assert task.sampler is not None
        token = self.model.sample(task.slot, task.sampler, task.generated)
        task.row = False
        task.tokens.append(token)
        self._counters["generated"] += 1
        if task.first_token_at is None:
            task.first_token_at = self._now
        if self.model.is_eog(token) and not task.spec.sampling.ignore_eos:
            self._finish(task, "eos", str(token), self.model.piece(token))
            return
        text, ending = self._read(task, token)
        self._tell(task, token, text)
        if ending is not None:
            self._finish(task, *ending)

    def _read(self, task: Task, token: int) -> tuple[bytes, tuple[str, str] | None]:
        """Return the text that *token* releases, and why the turn ends with it, if it does."""
        spec, ctx_size = task.spec, self._ctx_size(task)
        hidden = not spec.special and self.model.is_control(token)
        text, stop = task.text.feed(b"" if hidden else self.model.piece(token))
        if stop is not None:
            return text, ("stop", stop)
        if 0 <= spec.n_predict <= task.generated:
            return text, ("length", str(spec.n_predict))
        if len(task.tokens) >= ctx_size:
            return text, ("context_full", str(ctx_size))
        return text, None

    def _tell(self, task: Task, token: int, text: bytes) -> None:
        self.outbox.append(m.Tokens(task.spec.id, [token], text))
        if task.spec.pull:
            task.asked -= 1
        elif task.credit > 0:
            task.credit -= 1
        if not task.wants_token:
            task.unread_since = self._now

    # Ends.

    def _finish(self, task: Task, reason: str, detail: str, end: bytes = b"") -> None:
        stats = task.stats(reason, detail, self._now)
        self.outbox.append(m.Finished(task.spec.id, task.text.flush(), end, stats))
        self._remove(task)

    def _fail(self, task: Task, error: InferdError) -> None:
        self.outbox.append(m.Failed(task.spec.id, error.to_wire()))
        self._remove(task)

    def _remove(self, task: Task) -> None:
        del self._tasks[task.spec.id]
        if task.slot >= 0:
            self.slots.give_back(task, self.clock)
        else:
            self.queue.remove(task)
            self.slots.forget(task)
        if task.sampler is not None:
            task.sampler.close()
            task.sampler = None

    def check_integrity(self) -> None:
        """Assert the invariants: no task lost or doubled, no slot leaked."""
        leased = self.slots.tasks
        assert len(leased) + len(self.queue) == len(self._tasks)
        assert {id(t) for t in (*leased, *self.queue)} == {id(t) for t in self._tasks.values()}
        self.slots.check_integrity({t.spec.id for t in self.queue if t.state is TaskState.PARKED})

    def statistics(self) -> dict[str, Any]:
        """Return the counters since the start and what is here now."""
        states = [t.state for t in self._tasks.values()]
        return {
            **self._counters,
            **{state.value: states.count(state) for state in TaskState},
            "steps": self.steps,
            "parked_bytes": self.slots.parked_bytes,
            "slots": len(self.slots),
        }

"""From logits to reports: sampled tokens, and tasks that end or shift their context by them."""

from __future__ import annotations

from collections.abc import Iterable

from ...backends import Model
from ...backends.errors import BackendError
from .. import messages as m
from ..output.logprobs import token_logprobs
from ..output.sampling import sample_token
from ..output.similarity_check import end_check, is_awaited, request_check
from ..output.stopping import Ending
from ..output.stopping.ending import CONTEXT_FULL, LENGTH
from ..task import Task, TaskState
from .metrics import EngineMetrics
from .task_table import TaskTable


class Answers:
    """The answers of the tasks that run. Owned by the engine."""

    def __init__(self, model: Model, tasks: TaskTable, metrics: EngineMetrics):
        self._model, self._tasks = model, tasks
        self._clock, self._reporter, self._slots = tasks.clock, tasks.reporter, tasks.slots
        self._counts = metrics.counts

    def serve_readers(self) -> None:
        """Sample the tokens that pull readers have asked for since the last iteration."""
        self.sample([t for t in self._slots.tasks if t.has_logits])

    def sample(self, tasks: Iterable[Task]) -> None:
        """Sample a token of each task whose reader takes one; all have logits."""
        now = self._clock.now
        for task in tasks:
            if task.prompt_done_at is None:
                task.prompt_done_at = now
            if task.spec.n_predict == 0:
                self._tasks.finish_task(task, Ending(LENGTH, "0"))
            elif task.wants_token:
                self._sample_token(task)
            elif task.unread_since is None:
                task.unread_since = now

    def _sample_token(self, task: Task) -> None:
        last = len(task.tokens) + 1 >= task.ctx_size and not self._may_shift(task)
        sampled = sample_token(self._model, task, self._clock.now, last=last)
        self._counts["generated"] += 1
        if task.first_token_at is None:
            task.first_token_at = self._clock.now
        if sampled.text is not None:
            self._report_token(task, sampled.token, sampled.text, sampled.surprisal)
        self.go_on(task, sampled.ending)

    def _report_token(self, task: Task, token: int, text: bytes, surprisal: float | None) -> None:
        logprobs = token_logprobs(self._model, task)
        self._reporter.send(m.Tokens(task.spec.id, [token], text, surprisal, logprobs))
        if task.spec.pull:
            task.asked -= 1
        elif task.credit > 0:
            task.credit -= 1
        if not task.wants_token:
            task.unread_since = self._clock.now

    def go_on(self, task: Task, ending: Ending | None) -> None:
        """Let a task go on to its next token, or to its end, once its sentences are judged."""
        if task.text.question is not None:
            self._reporter.send(request_check(task, ending, self._clock.now))
        elif ending is not None:
            self._tasks.finish_task(task, ending)
        elif task.state is TaskState.WAITING and len(task.tokens) >= task.ctx_size:
            self.shift_context(task)  # the previous worker was about to

    def apply_verdict(self, verdict: m.Verdict) -> None:
        """Let a task go on whose last sentence was judged."""
        task = self._tasks.find_task(verdict.task_id)
        if task is not None and is_awaited(task, verdict):
            self.go_on(task, end_check(task, verdict))

    # Context shift.

    def _may_shift(self, task: Task) -> bool:
        can = self._model.info.can_shift and task.spec.ctx_shift
        return can and task.shifts < self._tasks.limits.shifts_max

    def shift_context(self, task: Task) -> None:
        """Let a full context drop old tokens, as llama-server does; the first one always stays."""
        ctx_size = task.ctx_size
        keep = task.prompt_size if task.spec.n_keep < 0 else task.spec.n_keep
        keep = max(1, min(keep, ctx_size - 4))
        left = len(task.tokens) - 1 - keep
        discard = min(max(task.spec.n_discard or left // 2, 1), left - 1)
        if not self._may_shift(task) or left < 2:
            self._tasks.finish_task(task, Ending(CONTEXT_FULL, str(ctx_size)))
            return
        if task.slot >= 0:
            self._shift_slot(task, keep, discard)
        del task.tokens[keep : keep + discard]
        task.dropped += discard
        task.shifts += 1
        self._counts["shifts"] += 1
        self._reporter.send(m.Shifted(task.spec.id, keep, discard))

    def _shift_slot(self, task: Task, keep: int, discard: int) -> None:
        try:
            self._model.shift(task.slot, keep, discard)
            task.computed -= discard
            task.shifted = task.shift_pending = True
        except BackendError:  # cells are missing: the shortened text is computed again
            self._slots.clear_task(task)

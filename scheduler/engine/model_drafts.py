"""The draft model of an engine, or the NextN layers of its model: their steps, the time that these
take, and their failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ...backends import LanguageModel
from ...backends.errors import BackendError
from ..drafting.model_drafter import LAG_MAX, ModelDrafter
from ..policy.draft_plan import LOSS_MAX, Acceptance
from ..record import ActivityKind
from ..task import Task
from .metrics_publisher import MetricsPublisher
from .task_table import TaskTable

T = TypeVar("T")


class ModelDrafts:
    """Owned by the engine. A draft model that fails is not used again: turns go on without it."""

    def __init__(self, model: LanguageModel, tasks: TaskTable, metrics: MetricsPublisher):
        self.learned = Acceptance.of_models()
        """The acceptance of all streams, with which a new one begins."""
        self.error = ""
        """Why the draft model is no longer used; empty if it is."""
        self._clock, self._slots, self._reporter = tasks.clock, tasks.slots, tasks.reporter
        self._target_s = tasks.settings.step_s_target
        self._recorder = metrics.recorder
        self._drafter: ModelDrafter | None = None
        self.name = "" if model.draft is None else model.draft.name
        """The drafter that it is."""
        if model.draft is not None:
            self._drafter = ModelDrafter(model.draft, tasks.clock.read, model.is_eog)
        self._seconds: dict[int, float] = {}
        """By the task's id, its share of the draft model's time since `take_seconds`."""
        self.step_s = 0.0
        """The time that it took before the present step; the caller resets it."""
        self._spare_s = 0.0
        """The time for which streams may wait while the draft model catches up with others."""

    @property
    def is_on(self) -> bool:
        """Whether the model has a draft model, which has not failed."""
        return self._drafter is not None

    @property
    def drafter(self) -> ModelDrafter:
        """The draft model's drafter; only while `is_on`."""
        assert self._drafter is not None
        return self._drafter

    def use_threads(self, threads: int) -> None:
        """Predict the time with this many threads from now on."""
        if self._drafter is not None:
            self._drafter.cost.use_threads(threads)

    def draft_s(self, streams: int, drafts: int) -> float:
        """Return the seconds in which each of *streams* gets that many *drafts*."""
        return 0.0 if self._drafter is None else self._drafter.draft_s(streams, drafts)

    def propose(self, wanted: Sequence[tuple[Task, int]]) -> dict[int, list[int]]:
        """Return by the task's id the tokens that are expected next, at most as many as *wanted*;
        none if the draft model fails.
        """
        if self._drafter is None or not wanted:
            return {}
        propose = self._drafter.propose
        return self._run([task for task, _ in wanted], lambda: propose(wanted)) or {}

    def catch_up(self, task: Task, lag: int, step_s: float, *, alone: bool) -> None:
        """Compute some of the *lag* tokens of *task* that the draft model has not computed.

        The time is what the step's target leaves beside *step_s*, that of a step without drafts, if
        the step has the task *alone*. Other streams wait for `LOSS_MAX` of their time.
        """
        drafter, seconds = self.drafter, max(self._target_s - step_s, step_s / 2)
        if not alone:
            self._spare_s = min(self._spare_s + LOSS_MAX * step_s, self._target_s)
            seconds = self._spare_s
            if drafter.lag_s(task, min(lag, LAG_MAX)) > seconds:
                return
        self._run([task], lambda: drafter.catch_up(task, seconds))
        if not alone:
            self._spare_s -= self._seconds.get(task.spec.id, 0.0)

    def _run(self, tasks: Sequence[Task], compute: Callable[[], T]) -> T | None:
        """Run a computation for *tasks*, and note its time; return None if it fails."""
        ids = [task.spec.id for task in tasks]
        self._recorder.record_activity(ActivityKind.STEP, ids)
        started = self._clock.read()
        try:
            return compute()
        except BackendError as exc:
            self.error, self._drafter = exc.message, None
            self._reporter.log_drafting_failed(tasks, exc)
            return None
        finally:
            seconds = self._clock.read() - started
            self.step_s, share = self.step_s + seconds, seconds / len(tasks)
            for number in ids:
                self._seconds[number] = self._seconds.get(number, 0.0) + share
            self._recorder.record_activity(ActivityKind.OTHER)

    def take_seconds(self, task: Task) -> float:
        """Return the share of *task* in the time that the draft model took since the last call."""
        return self._seconds.pop(task.spec.id, 0.0) if self._seconds else 0.0

    def forget_session(self, session: str) -> None:
        """Drop the tokens of a session that is being deleted."""
        if self._drafter is not None:
            self._drafter.forget_session(session)

    def follow_slots(self) -> None:
        """Clear the draft model's slots that no task may use now."""
        self._seconds.clear()
        if self._drafter is not None:
            self._drafter.follow_slots(self._slots)

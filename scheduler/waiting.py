"""Waiting tasks as clients see them: positions, reasons and estimated starts.

The estimate is a pure simulation. It knows a task's class and remaining tokens, and a slot's time
per token while the other slots are busy. Those times suit waiting tasks, which wait only while all
slots are busy.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import messages as m
from .owner import Priority
from .policy.order import Order
from .policy.slot_plan import reader_lags
from .record import WaitReason
from .settings import EngineSettings
from .task import Task


def wait_reason(task: Task, settings: EngineSettings, now: float, clock: int) -> WaitReason:
    """Return why *task* has no slot at *now*, when the token clock is at *clock*."""
    if task.preparing:
        return WaitReason.GRAMMAR
    if task.fetching:
        return WaitReason.DISK
    if task.awaits_media:
        return WaitReason.ENCODING
    if not (task.has_work or task.wants_token) or reader_lags(task, settings, now):
        return WaitReason.READER
    if task.preempted_by_kv_pressure:
        return WaitReason.CELLS
    if task.follows:
        return WaitReason.PREFIX
    return WaitReason.OPERATOR if task.yields(clock) else WaitReason.SLOT


ENCODING = "encoding"
"""The state, in the queue, of a task that waits for the embeddings of its next image or sound."""
FORGET = 0.9
"""Decay per turn, with which the last ten turns have about two thirds of the weight."""
TOKEN_S_MIN = 1e-9
"""Avoids division by zero when the clock has not advanced."""
UNOCCUPIED = -1
"""The user of a slot without a task."""
PROMPT_S, OUTPUT_S, OUTPUT_TOKENS = 0.003, 0.05, 128.0
"""Assumptions before the first turn has ended; they fit a small model on two cores."""


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """The rest of a task: prompt tokens to compute, output tokens to expect (`math.inf` if nothing
    shows its end), and the most output tokens that its limit allows.
    """

    prompt_tokens: int
    output_tokens: float
    output_tokens_max: float = math.inf


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Seconds that one slot takes for a prompt token and for an output token."""

    prompt_s: float
    output_s: float

    def seconds(self, work: RemainingWork) -> float:
        """Return how long *work* is expected to occupy a slot."""
        return work.prompt_tokens * self.prompt_s + work.output_tokens * self.output_s

    def seconds_max(self, work: RemainingWork) -> float:
        """Return how long *work* can occupy a slot."""
        return work.prompt_tokens * self.prompt_s + work.output_tokens_max * self.output_s


@dataclass(frozen=True, slots=True)
class QueuedTask:
    """A running or waiting task, as far as its class, age and past decide who gets a slot."""

    work: RemainingWork
    priority: int = Priority.NORMAL
    effective: int = Priority.NORMAL
    rises_after: float = math.inf
    """Tokens after which its effective class rises, while it waits."""
    user: int = 0
    served: tuple[int, int] = (0, 0)
    """Tokens computed for its user, and for the label."""
    quantum: int = 0
    """Tokens computed in its quantum, if it runs."""
    idle_s: float = 0.0
    """Time since a token of it was computed."""
    passed_over_s: float = 0.0
    """Time for which higher classes have kept it from computing."""


@dataclass(slots=True)
class _Slot:
    task: QueuedTask
    end_s: float
    end_s_max: float
    quantum_end_s: float
    begin_s: float = 0.0
    """The start of its task."""


class StartEstimator:
    """Predicts when each of the *waiting* tasks, in order, gets one of the *slots*.

    If more tasks are *running* than there are slots, the surplus queues before the waiting ones.
    *reserved_after* is the number of tokens until the next reserved quantum is due.
    """

    def __init__(
        self,
        running: Sequence[QueuedTask],
        waiting: Sequence[QueuedTask],
        slots: int,
        times: TokenTimes,
        settings: EngineSettings,
        reserved_after: int = 0,
    ):
        self._times, self._settings = times, settings
        self._quantum_s = settings.quantum_tokens * times.output_s
        self._token_s = times.output_s / slots
        self._extra, self._waiting = running[slots:], waiting
        unoccupied = QueuedTask(RemainingWork(0, 0, 0), effective=Priority.LOW, user=UNOCCUPIED)
        self._slots = [_Slot(unoccupied, 0.0, 0.0, 0.0) for _ in range(slots)]
        for slot, task in zip(self._slots, running, strict=False):
            began_s = -task.quantum * times.output_s
            self._occupy_slot(slot, task, began_s, 0.0, preempts=False)
        self._reserved = self._reserved_starts(reserved_after)
        self._users = len({task.user for task in (*running, *waiting)})

    def starts(self) -> list[float]:
        """Return the seconds from now until each waiting task gets a slot."""
        for task in self._extra:
            self._start_task(task)
        if self._settings.priority_strict or len({t.user for t in self._waiting}) < 2:
            return [self._start_task(task) for task in self._waiting]
        users: dict[int, deque[tuple[int, QueuedTask]]] = {}
        for place, task in enumerate(self._waiting):
            users.setdefault(task.user, deque()).append((place, task))
        found = [0.0] * len(self._waiting)
        while users:
            used = Counter(slot.task.user for slot in self._slots)
            user = min(users, key=lambda user: (used[user], users[user][0][0]))
            place, task = users[user].popleft()
            found[place] = self._start_task(task)
            if not users[user]:
                del users[user]
        return found

    def _start_task(self, task: QueuedTask) -> float:
        """Give *task* the slot that it can have first; return the time. The task keeps the slot to
        its end, or to the end of its quantum if another task waits.
        """
        used = Counter(slot.task.user for slot in self._slots)
        times = [self._free_at(slot, task, used) for slot in self._slots]
        start = min(times)
        slot = self._slots[times.index(start)]
        reserved = self._reserved.get(id(task), math.inf)
        if reserved < start:
            return reserved  # it runs for one quantum, then the slot's task continues
        self._occupy_slot(slot, task, start, start, preempts=self._preempts(task, slot, used))
        return start

    def _occupy_slot(
        self, slot: _Slot, task: QueuedTask, quantum_s: float, start: float, *, preempts: bool
    ) -> None:
        """Give *slot* to *task* at *start*; its quantum began at *quantum_s*. A preempted task gets
        the slot back afterwards.
        """
        left, left_max = (slot.end_s, slot.end_s_max) if preempts else (0.0, 0.0)
        slot.task, slot.begin_s, slot.quantum_end_s = task, start, quantum_s + self._quantum_s
        slot.end_s = start + self._times.seconds(task.work) + left
        slot.end_s_max = start + self._times.seconds_max(task.work) + left_max

    def _competes(self, task: QueuedTask, other: QueuedTask) -> bool:
        """Return whether the classes of two tasks do not count, because users are equal."""
        return not self._settings.priority_strict and task.user != other.user

    def _preempts(self, task: QueuedTask, slot: _Slot, used: Counter[int]) -> bool:
        """Return whether *task* gets a slot at once. Users have *used* these numbers of slots."""
        if not self._competes(task, slot.task):
            return task.priority > slot.task.effective
        urgent = task.priority == Priority.URGENT > slot.task.priority
        return urgent or used[slot.task.user] >= used[task.user] + 2

    def _free_at(self, slot: _Slot, task: QueuedTask, used: Counter[int]) -> float:
        """Return when *task* can have a slot:

        - at once, if its own class is higher, or its user has fewer slots;
        - once its user, who has no slot, is behind by `slot_lag_s`;
        - at the end of a quantum, once its effective class is equal and its owner was not served
          more;
        - else when the slot's task ends. Other tasks of a higher class may follow one of a higher
          class, so its maximum length counts.
        """
        if self._preempts(task, slot, used):
            return slot.begin_s if self._competes(task, slot.task) else 0.0
        at, rises = max(0.0, slot.quantum_end_s), slot.task.effective - task.effective
        if self._competes(task, slot.task):
            rises = 0
        if rises > 0:
            tokens = task.rises_after + (rises - 1) * self._settings.ageing_tokens
            at = max(at, tokens * self._token_s + self._quantum_s)
        lead_s = max(0, _lead(task.served, slot.task.served)) * self._times.output_s
        free_s = min(slot.end_s_max if rises > 0 else slot.end_s, at + lead_s)
        if self._competes(task, slot.task) and not used[task.user]:
            behind_s = self._settings.slot_lag_s * self._users - task.idle_s
            free_s = min(free_s, max(slot.begin_s, behind_s))
        return free_s

    def _reserved_starts(self, reserved_after: int) -> dict[int, float]:
        """Return when waiting tasks of lower classes get a reserved quantum, by their `id`. In each
        round, each user with such tasks gets one quantum.
        """
        highest = max(slot.task.effective for slot in self._slots)
        lower = [t for t in self._waiting if t.effective < highest]
        period_s = self._settings.reserved_share * self._settings.quantum_tokens * self._token_s
        due_s, found = max(0, reserved_after) * self._token_s, {}
        rounds: Counter[int] = Counter()
        by_round = []
        for task in sorted(lower, key=lambda t: -t.idle_s):
            by_round.append((rounds[task.user], task))
            rounds[task.user] += 1
        for _, task in sorted(by_round, key=lambda entry: entry[0]):
            found[id(task)] = due_s = max(due_s, self._settings.passed_over_s - task.passed_over_s)
            due_s += period_s
        return found


def _lead(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return how many more tokens *one* was served than *other*: by user or, if the users are
    equal, by label.
    """
    return next((a - b for a, b in zip(one, other, strict=True) if a != b), 0)


class TurnEstimator:
    """Learns from ended turns how long tokens take and how long answers are.

    For answers with a limit it learns the share of the limit that they reached, which predicts more
    than the mean length if programs request exact numbers of tokens.
    """

    def __init__(self) -> None:
        self._prompt = RunningRatio(PROMPT_S)
        self._output = RunningRatio(OUTPUT_S)
        self.mean_length = RunningRatio(OUTPUT_TOKENS)
        self._share = RunningRatio(0.0)
        self._mean_reasoning = RunningRatio(0.0)

    @property
    def token_times(self) -> TokenTimes:
        """The time of a token, by the turns so far."""
        times = self._prompt.value, self._output.value
        return TokenTimes(*(max(seconds, TOKEN_S_MIN) for seconds in times))

    def learn_rates(
        self, prompt_tokens: int, prompt_s: float, output_tokens: int, output_s: float
    ) -> None:
        """Add the times of a turn that was never parked, for its computed prompt and its output."""
        self._prompt.add_sample(prompt_s, prompt_tokens)
        self._output.add_sample(output_s, output_tokens)

    def learn_length(
        self, output_tokens: int, limit: int = -1, *, reasoning_tokens: int = 0
    ) -> None:
        """Add the length of an answer that was bounded by *limit* tokens (-1: unbounded), of which
        so many were *reasoning_tokens*.
        """
        self.mean_length.add_sample(output_tokens, 1)
        self._mean_reasoning.add_sample(reasoning_tokens, 1)
        if limit > 0:
            self._share.add_sample(output_tokens, limit)

    def remaining_work(
        self, prompt_tokens: int, done: int = 0, limit: int = -1, reasoning_budget: int = -1
    ) -> RemainingWork:
        """Return the rest of a task with *prompt_tokens* to compute and *done* output tokens, whose
        output is bounded by *limit*, and its reasoning by *reasoning_budget* (-1: unbounded).

        If the answer is already longer than expected, or nothing was learned, its limit is assumed.
        """
        whole = self.mean_length.value if self.mean_length.known else 0.0
        if reasoning_budget >= 0:
            whole -= max(0.0, self._mean_reasoning.value - reasoning_budget)
        bound = math.inf
        if limit >= 0:
            whole, bound = max(min(whole, limit), self._share.value * limit), max(0, limit - done)
        return RemainingWork(prompt_tokens, whole - done if whole > done else bound, bound)


class RunningRatio:
    """The ratio of two sums that forget exponentially; *assumed* until the first sample."""

    def __init__(self, assumed: float):
        self.value = assumed
        self._sum = self._count = 0.0

    @property
    def known(self) -> bool:
        """Whether there was a sample."""
        return self._count > 0

    def add_sample(self, sum_: float, count: float) -> None:
        """Add to both sums; a *count* of 0 changes nothing."""
        if count > 0:
            self._sum = self._sum * FORGET + sum_
            self._count = self._count * FORGET + count
            self.value = self._sum / self._count


UNESTIMATED = -1
POSITION_PAUSE_S = 0.01
"""The pause between two reports of changed positions, for each waiting task beyond the first
`POSITIONS_AT_ONCE`. A report takes about 0.05 ms for each waiting task, while no step is computed.
"""
POSITIONS_AT_ONCE = 10


def subscribes(task: Task) -> bool:
    """Return whether the places of a waiting task are reported. While its grammar is not compiled
    yet, the task may still be refused.
    """
    return task.spec.watch and not task.preparing


class QueueView:
    """The queue at one moment. *estimator* has learned from the turns that have ended. For
    *reserved_after* see `StartEstimator`.
    """

    def __init__(
        self,
        running: Sequence[Task],
        queue: Sequence[Task],
        slots: int,
        order: Order,
        settings: EngineSettings,
        estimator: TurnEstimator,
        now: float,
        reserved_after: int,
    ):
        self._running, self._order, self._now = running, order, now
        self._slots, self._settings, self._estimator = slots, settings, estimator
        self._waiting = sorted(queue, key=order.key)
        self._reserved_after = reserved_after

    def _starts(self) -> list[float | None]:
        """Return the seconds until each waiting task gets a slot. They are None for a task that was
        parked by hand, or that waits for its reader, for embeddings or for KV space, because
        nothing bounds them.
        """
        bounded = [t for t in self._waiting if self._may_start(t)]
        estimator = StartEstimator(
            [self._queued(t) for t in self._running],
            [self._queued(t) for t in bounded],
            self._slots,
            self._estimator.token_times,
            self._settings,
            self._reserved_after,
        )
        starts = dict(zip(map(id, bounded), estimator.starts(), strict=True))
        return [starts.get(id(t)) for t in self._waiting]

    def _may_start(self, task: Task) -> bool:
        """Return whether *task* gets a slot in its order."""
        return (
            (task.has_work or task.wants_token)
            and not task.awaits_media
            and not self._order.yields(task)
            and not task.preempted_by_kv_pressure
            and not reader_lags(task, self._settings, self._now)
        )

    def _queued(self, task: Task) -> QueuedTask:
        age, ageing = self._order.age(task), self._settings.ageing_tokens
        return QueuedTask(
            self._remaining(task),
            task.spec.priority,
            self._order.effective(task),
            rises_after=ageing - age % ageing,
            user=task.spec.owner.user,
            served=self._order.served(task),
            quantum=task.quantum,
            idle_s=self._now - task.computed_at,
            passed_over_s=self._now - task.passed_over_since,
        )

    def _remaining(self, task: Task) -> RemainingWork:
        prompt = max(0, task.prompt_size - task.computed - task.dropped)
        if task.spec.embed is not None:
            return RemainingWork(prompt, 0, 0)
        reasoning = task.spec.reasoning
        work = self._estimator.remaining_work(
            prompt,
            task.generated,
            task.spec.n_predict,
            -1 if reasoning is None else reasoning.budget,
        )
        if task.spec.ctx_shift:
            return work
        left = max(0, task.ctx_size - len(task.tokens))
        return RemainingWork(
            prompt, min(work.output_tokens, left), min(work.output_tokens_max, left)
        )

    def changed_positions(self) -> Iterator[m.Position]:
        """Yield the places that have changed since the last report, of tasks that subscribed."""
        changed = {
            i: t
            for i, t in enumerate(self._waiting)
            if subscribes(t) and t.reported_position != i + 1
        }
        starts = self._starts() if changed else []
        for i, task in changed.items():
            task.reported_position = i + 1
            yield m.Position(task.spec.id, i + 1, len(self._waiting), starts[i])

    def first_positions(self) -> Iterator[m.Position]:
        """Yield the places of tasks that subscribed and have no report yet, without the estimates,
        which take the most time.
        """
        for i, task in enumerate(self._waiting):
            if subscribes(task) and not task.reported_position:
                task.reported_position = UNESTIMATED
                yield m.Position(task.spec.id, i + 1, len(self._waiting), None)

    def entries(self) -> list[m.QueueEntry]:
        """Return the running tasks by slot, then the waiting ones in order."""
        starts = zip(self._waiting, self._starts(), strict=True)
        waiting = [self._entry(t, i, s) for i, (t, s) in enumerate(starts, 1)]
        return [self._entry(t, 0, 0.0) for t in self._running] + waiting

    def _entry(self, task: Task, position: int, starts_in_s: float | None) -> m.QueueEntry:
        return m.QueueEntry(
            task_id=task.spec.id,
            state=ENCODING if task.awaits_media else task.state.value,
            position=position,
            effective_priority=Priority(self._order.effective(task)),
            prompt_tokens=task.prompt_size,
            computed_tokens=task.computed,
            output_tokens=task.generated,
            waited_s=self._now - task.arrived_at,
            starts_in_s=starts_in_s,
        )

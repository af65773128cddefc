"""Plans of slots and batches: functions of the engine's state, without model or clock.

`plan_slots` decides which tasks get, keep and lose a slot; it changes only `Task.boost`. Once
the engine has done that, `adapter_quantum.plan_adapters` decides which tasks share the next batch,
and `plan_tokens` plans its tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...backends import Chunk
from ..kv.slots import Slot
from ..owner import OwnerClock
from ..priority import PRIORITY_MAX, Priority
from ..settings import EngineSettings
from ..task import Task
from .cost import StepCost, StepLoad
from .forced_chunks import plan_forced

LOW_STEP = 2 / 3
"""Share of `step_s_target` for a step in which prompts of the lowest class are computed."""
FIRST_STEP_TOKENS = 32
"""Prompt tokens of the very first step, before the machine's speed is known."""
CHUNK_MIN = 8
"""A smaller chunk is not scheduled unless it ends its prompt: its own cost is too high."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """First park, then start. Each pair of *follow* is a task and the leader that it waits for."""

    park: tuple[Task, ...] = ()
    start: tuple[Task, ...] = ()
    follow: tuple[tuple[Task, Task], ...] = ()


class ScheduledTokens(msgspec.Struct, frozen=True):
    """The next *count* pending tokens of *task* go into the batch."""

    task: Task
    count: int

    def chunk(self, *, generates: bool = True) -> Chunk:
        """Return the chunk for the model, with logits where a task that *generates* needs them."""
        task, start = self.task, self.task.computed
        end = start + self.count
        logits = generates and end == len(task.tokens)
        return Chunk(task.slot, task.tokens[start:end], start, logits)


class Order:
    """The order of tasks: (effective class, tokens served to the user, and to the label, place). A
    task with a reserved quantum comes first, tasks that were parked by hand last.

    The place is that of arrival; a task that is parked after a quantum gets a new last place.
    """

    def __init__(self, clock: int, owners: OwnerClock, settings: EngineSettings):
        self._clock, self._owners, self._settings = clock, owners, settings

    def effective(self, task: Task) -> int:
        """Return the class of *task* with its age."""
        if task.reserved_tokens:
            return PRIORITY_MAX
        return self.effective_unreserved(task)

    def effective_unreserved(self, task: Task) -> int:
        """Return the class of *task* with its age, without its reserved quantum."""
        return task.effective_class(self._clock, self._settings.ageing_tokens)

    def age(self, task: Task) -> int:
        """Return the age of *task* in tokens."""
        return task.age_at(self._clock)

    def yields(self, task: Task) -> bool:
        """Return whether *task* was parked by hand and still gives way to all others."""
        return task.yields(self._clock)

    def key(self, task: Task) -> tuple[bool, int, int, int, int]:
        """Return the sort key of *task*; the least goes first."""
        return (self.yields(task), *self.rank(task), task.queue_number)

    def rank(self, task: Task) -> tuple[int, int, int]:
        """Return the part of `key` before the place: equals alternate by quanta."""
        if task.reserved_tokens:
            return -PRIORITY_MAX - 1, 0, 0
        return (-self.effective(task), *self.served(task))

    def served(self, task: Task) -> tuple[int, int]:
        """Return the tokens served to the user of *task*, and to the label."""
        return self._owners.served(task.spec.owner)


def plan_slots(
    queue: Sequence[Task],
    slots: Sequence[Slot],
    order: Order,
    settings: EngineSettings,
    now: float,
    find_leader: Callable[[Task, Sequence[Task]], Task | None] = lambda task, running: None,
) -> SlotPlan:
    """Decide which tasks are parked and which get a slot, the first in order first.

    A task preempts a running one at once if its own class is above the other's effective class, if
    it has a reserved quantum, or if the other was not read for `reader_lag_s`. Otherwise it
    preempts one whose quantum has ended, if its effective class is higher, or equal and its owner
    was not served more. *find_leader* returns the running task that computes a prefix of a task,
    which then takes no slot until the prefix is computed.
    """
    waiting = sorted((t for t in queue if t.has_work or t.wants_token), key=order.key)
    staying = [s.task for s in slots if s.task is not None]
    free = len(slots) - len(staying)
    park: list[Task] = []
    start: list[Task] = []
    follow: list[tuple[Task, Task]] = []
    floor: int | None = None
    for task in waiting:
        if floor is not None and task.spec.priority <= floor:
            continue
        leader = find_leader(task, staying + start)
        if leader is not None:
            follow.append((task, leader))
            leader.boost = max(leader.boost, order.effective(task))
            continue
        if free:
            free -= 1
        else:
            victim = _victim(task, staying, order, settings, now)
            if victim is None:  # of the tasks behind it, only a higher own class can preempt
                settled = [order.effective(t) for t in staying if not t.shift_pending]
                floor = min(settled, default=PRIORITY_MAX)
                continue
            staying.remove(victim)
            park.append(victim)
        start.append(task)
    return SlotPlan(tuple(park), tuple(start), tuple(follow))


def _victim(
    task: Task, running: Sequence[Task], order: Order, settings: EngineSettings, now: float
) -> Task | None:
    running = [t for t in running if not t.shift_pending]
    unread = [t for t in running if reader_lags(t, settings, now)]
    if unread:
        return min(unread, key=lambda t: (order.effective(t), -t.arrival))
    running = [t for t in running if not t.reserved_tokens]
    lowest = min(running, key=lambda t: (order.effective(t), -t.arrival), default=None)
    if lowest is None:
        return None
    if task.reserved_tokens or task.spec.priority > order.effective(lowest):
        return lowest
    done = [
        t
        for t in running
        if t.quantum >= settings.quantum_tokens and order.rank(task) <= order.rank(t)
    ]
    last = max(done, key=order.key, default=None)
    if last is not None and last.spec.priority > order.effective(lowest):
        return lowest  # the parked task would preempt it at once
    return last


def reader_lags(task: Task, settings: EngineSettings, now: float) -> bool:
    """Return whether the task was not read for so long that it gives way to any other."""
    return task.unread_since is not None and now >= task.unread_since + settings.reader_lag_s


def next_trial(tasks: Sequence[Task], order: Order, *, tried: bool) -> Task | None:
    """Return the task on trial that the next step computes alone; None: it computes the others.
    The two alternate: the last step *tried* one or did not.
    """
    trials = [t for t in tasks if t.trial_tokens and t.has_work]
    if not trials or (tried and any(t.has_work and not t.trial_tokens for t in tasks)):
        return None
    return min(trials, key=order.key)


def plan_trial(
    task: Task, settings: EngineSettings, batch_size: int, cost: StepCost
) -> list[ScheduledTokens]:
    """Return the tokens of a step that computes only *task*."""
    left = batch_size if cost.known else min(batch_size, FIRST_STEP_TOKENS)
    step = StepBudget([], cost, left, settings.prompt_tokens_min, settings.step_s_target)
    return [ScheduledTokens(task, step.schedule_prompt(task))]


def plan_tokens(
    running: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    batch_size: int,
    cost: StepCost,
    adapters: tuple[str, ...] = (),
) -> list[ScheduledTokens]:
    """Return the next batch of the *running* tasks, in their order, that have these *adapters*.

    Every decoding task gets one token, or a chunk of forced ones (`plan_forced`). Prompts share the
    rest of the step's time (`_step_s`), in the order of the queue. They get at least half as much
    time as the decoding tokens take, even if the step then exceeds its target. Prompts of a lower
    class wait for those of a higher one.
    """
    tasks = [t for t in running if t.has_work and t.spec.adapters == adapters]
    prompts = [t for t in tasks if t.prefilling]
    decoding = [t for t in tasks if not t.prefilling]
    most = batch_size if cost.known else min(batch_size, len(decoding) + FIRST_STEP_TOKENS)
    most_forced = most - settings.prompt_tokens_min if prompts else most
    seconds = _forced_s(decoding, prompts, order, settings)
    planned = plan_forced(decoding, cost, seconds, max(most_forced, len(decoding)))
    if not prompts:
        return [ScheduledTokens(t, n) for t, n in zip(decoding, planned, strict=True)]
    counts = {id(t): n for t, n in zip(decoding, planned, strict=True)}
    chunks = [(t.computed, counts[id(t)]) for t in decoding]
    step = StepBudget(chunks, cost, most - sum(planned), settings.prompt_tokens_min)
    prompts.sort(key=order.key)
    first = order.effective(prompts[0])
    prompts = [t for t in prompts if order.effective(t) == first]
    own = max(map(order.effective_unreserved, prompts))
    step.seconds = _step_s(own, decoding, prompts, order, settings, cost)
    step.seconds = max(step.seconds, 1.5 * step.predicted_s())
    for task in prompts:
        counts[id(task)] = step.schedule_prompt(task)
    return [ScheduledTokens(t, counts[id(t)]) for t in tasks if counts.get(id(t))]


def _forced_s(
    decoding: Sequence[Task], prompts: Sequence[Task], order: Order, settings: EngineSettings
) -> float:
    """Return the time for a step with chunks of forced tokens, before its prompts: streams stand
    still for it as for a prompt's chunk.
    """
    if prompts:
        return settings.step_s_target / 2
    if len(decoding) > 1:
        return settings.step_s_target
    low = any(order.effective(t) == Priority.LOW for t in decoding)
    return LOW_STEP * settings.step_s_target if low else settings.step_s_max


def _step_s(
    effective: int,
    decoding: Sequence[Task],
    prompts: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    cost: StepCost,
) -> float:
    """Return the time for a step in which *prompts* of one class are computed:

    - of the lowest class: `LOW_STEP` of `step_s_target`. Any arrival precedes them, but must wait
      for the step under way;
    - while tasks of a higher class decode: `step_s_target`;
    - while only tasks of lower classes decode, or none: `step_s_max`;
    - while tasks of their own class decode: `step_s_target`, or `step_s_max` for the prompts of one
      burst. Those got their slots at most `step_s_max` after a stream's first token and take at
      most `burst_s`; the stream waits for them.

    A reserved quantum does not change the class here.
    """
    highest = max(map(order.effective_unreserved, decoding), default=-1)
    if effective == Priority.LOW:
        return LOW_STEP * settings.step_s_target
    if highest > effective:
        return settings.step_s_target
    if highest < effective:
        return settings.step_s_max
    equals = [t for t in decoding if order.effective_unreserved(t) == effective]
    streaming_since = min(t.first_logits_at or 0.0 for t in equals)
    left = StepLoad.of_chunks([(t.computed, t.pending) for t in prompts])
    late = streaming_since + settings.step_s_max < max(t.slot_since for t in prompts)
    if late or cost.predict(left) > settings.burst_s:
        return settings.step_s_target
    return max(settings.step_s_target, settings.step_s_max)


@dataclass
class StepBudget:
    """The chunks (position, count) of a step, and the time and tokens that are left for more."""

    chunks: list[tuple[int, int]]
    cost: StepCost
    tokens_left: int
    tokens_min: int
    seconds: float = 0.0

    def predicted_s(self) -> float:
        """Return the seconds that the chunks so far will take."""
        return self.cost.predict(StepLoad.of_chunks(self.chunks))

    def schedule_prompt(self, task: Task) -> int:
        """Add as many tokens of *task* as fit, at least the prompts' minimum; return their number.

        Each chunk has a cost of its own. So the last tokens of a prompt are added to the previous
        ones, and a prompt does not begin with a few.
        """
        most = min(task.pending, task.tokens_to_checkpoint(), self.tokens_left)
        most = min(most, task.reserved_tokens or most, task.spec.batch_size or most)
        count = max(self._fitting(task.computed, most), min(most, self.tokens_min))
        if most - count <= count // 4:
            count = most
        elif count < CHUNK_MIN:
            count = 0
        if count:
            self.chunks.append((task.computed, count))
            self.tokens_left -= count
            self.tokens_min = max(0, self.tokens_min - count)
        return count

    def _fitting(self, position: int, most: int) -> int:
        """Return the greatest count, up to *most*, with which the step keeps to its time."""

        def seconds(count: int) -> float:
            return self.cost.predict(StepLoad.of_chunks([*self.chunks, (position, count)]))

        return bisect_right(range(1, most + 1), self.seconds, key=seconds)

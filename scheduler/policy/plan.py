"""Who runs next: pure functions of the engine's state, with neither model, clock nor thread.

`plan_slots` decides who gets, keeps and gives up a slot; once the engine has done that,
`groups.plan_group` decides which tasks can share the next batch and `plan_tokens` its tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ..kv.slots import Slot
from ..limits import Limits
from ..priority import Priority
from ..task import BASE_GROUP, Group, Task
from .cost import Load, StepCost


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """First park, then admit. Each of *follow* waits for what the other task is computing."""

    park: tuple[Task, ...] = ()
    admit: tuple[Task, ...] = ()
    follow: tuple[tuple[Task, Task], ...] = ()


class ScheduledTokens(msgspec.Struct, frozen=True):
    """The next *count* pending tokens of *task* go into the batch."""

    task: Task
    count: int


class OwnerClock:
    """Tokens computed for each owner: who has had least goes first.

    An owner who returns is lifted to the least of the active ones: idleness earns no credit
    (virtual token counter, Sheng et al., OSDI 2024). At most `OWNERS_MAX` are remembered.
    """

    OWNERS_MAX = 4096

    def __init__(self) -> None:
        self._served: dict[int, int] = {}

    def served(self, owner: int) -> int:
        """Return the tokens computed for *owner*."""
        return self._served.get(owner, 0)

    def arrive(self, owner: int, active: Iterable[int]) -> None:
        """Note a task of *owner*, while *active* owners have tasks."""
        owners = set(active)
        if owner in owners:
            return
        floor = min((self.served(o) for o in owners), default=0)
        self._served[owner] = max(self.served(owner), floor)
        self._forget(owners | {owner})

    def add(self, owner: int, tokens: int) -> None:
        """Count *tokens* computed for *owner*."""
        self._served[owner] = self.served(owner) + tokens

    def _forget(self, keep: set[int]) -> None:
        if len(self._served) > self.OWNERS_MAX:
            self._served = {o: n for o, n in self._served.items() if o in keep}


class Order:
    """The one order of tasks: (effective class, the owner's served tokens, place), and then those
    that were parked by hand.

    The place is that of arrival, and the last one again for who was parked after a quantum.
    """

    def __init__(self, clock: int, owners: OwnerClock, limits: Limits):
        self._clock, self._owners, self._limits = clock, owners, limits
        self._lifted: dict[int, int] = {}

    def lift(self, leader: Task, effective: int) -> None:
        """Give a *leader* at least the class of those who wait for what it computes."""
        self._lifted[leader.arrival] = max(self._lifted.get(leader.arrival, 0), effective)

    def effective(self, task: Task) -> int:
        """Return the class of *task* with its age."""
        own = task.effective_class(self._clock, self._limits.ageing_tokens)
        return max(own, self._lifted.get(task.arrival, 0))

    def key(self, task: Task) -> tuple[bool, int, int, int]:
        """Return what sorts *task*, first come first."""
        return (task.yields(self._clock), *self.rank(task), task.place)

    def rank(self, task: Task) -> tuple[int, int]:
        """Return what `key` has before the place: equals take turns by quanta."""
        return -self.effective(task), self._owners.served(task.spec.owner)


def plan_slots(
    queue: Sequence[Task],
    slots: Sequence[Slot],
    order: Order,
    limits: Limits,
    now: float,
    leader: Callable[[Task, Sequence[Task]], Task | None] = lambda task, running: None,
) -> SlotPlan:
    """Decide who is parked and who is admitted, best first.

    Preemption: at once for a task whose own class is above a running one's effective class;
    between equals only at the end of a quantum, for one whose owner was not served more; and
    whoever has not been read for `reader_wait_s` gives way to anybody. *leader* returns which of
    the running tasks computes what a task then need not compute: it takes no slot until then.
    """
    waiting = sorted((t for t in queue if t.has_work or t.wants_token), key=order.key)
    running = [s.task for s in slots if s.task is not None]
    free = len(slots) - len(running)
    park: list[Task] = []
    admit: list[Task] = []
    follow: list[tuple[Task, Task]] = []
    floor: int | None = None
    for task in waiting:
        if floor is not None and task.spec.priority <= floor:
            continue
        ahead = leader(task, [t for t in (*running, *admit) if t not in park])
        if ahead is not None:
            follow.append((task, ahead))
            order.lift(ahead, order.effective(task))
            continue
        if free:
            free -= 1
        else:
            stayed = [r for r in running if r not in park]
            victim = _victim(task, stayed, order, limits, now)
            if victim is None:  # only a higher own class helps whoever comes after it
                settled = [order.effective(r) for r in stayed if not r.shift_pending]
                floor = min(settled, default=Priority.URGENT)
                continue
            park.append(victim)
        admit.append(task)
    return SlotPlan(tuple(park), tuple(admit), tuple(follow))


def _victim(
    task: Task, running: Sequence[Task], order: Order, limits: Limits, now: float
) -> Task | None:
    running = [t for t in running if not t.shift_pending]
    unread = [t for t in running if absent(t, limits, now)]
    if unread:
        return min(unread, key=lambda t: (order.effective(t), -t.arrival))
    lowest = min(running, key=lambda t: (order.effective(t), -t.arrival), default=None)
    if lowest is None:
        return None
    if task.spec.priority > order.effective(lowest):
        return lowest
    done = [
        t
        for t in running
        if t.quantum >= limits.quantum_tokens and order.rank(task) <= order.rank(t)
    ]
    last = max(done, key=order.key, default=None)
    if last is not None and last.spec.priority > order.effective(lowest):
        return lowest  # the one parked would take its slot at once
    return last


def absent(task: Task, limits: Limits, now: float) -> bool:
    """Tell whether nobody has read the task for so long that it gives way to anybody."""
    return task.unread_since is not None and now >= task.unread_since + limits.reader_wait_s


def plan_tokens(
    slots: Sequence[Slot],
    order: Order,
    limits: Limits,
    batch_size: int,
    cost: StepCost,
    group: Group = BASE_GROUP,
) -> list[ScheduledTokens]:
    """Return the tokens of the next batch, in ascending slots: those of tasks of one *group*.

    Every task that decodes gets one token. Prompts share, in the order of the queue, what the
    step's time has left: `step_target_s` in all where they are read beside decoding tasks that
    are protected from them, but at least half of these tokens' own time; else what `_step_s` says.
    Prompts of a lower class wait for those of a higher one, which else would wait for them.
    """
    tasks = [s.task for s in slots if s.task is not None and s.task.has_work]
    tasks = [t for t in tasks if t.group == group]
    prompts = [t for t in tasks if t.prefilling]
    if not prompts:
        return [ScheduledTokens(t, 1) for t in tasks]
    decoding = [t for t in tasks if not t.prefilling]
    counts = {id(t): 1 for t in decoding}
    step = Step([(t.computed, 1) for t in decoding], cost)
    step.tokens_left = batch_size - len(decoding)
    if not cost.known:
        step.tokens_left = min(step.tokens_left, FIRST_STEP_TOKENS)
    step.tokens_least = limits.prompt_tokens_min
    prompts.sort(key=order.key)
    first = order.effective(prompts[0])
    prompts = [t for t in prompts if order.effective(t) == first]
    step.seconds = _step_s(first, decoding, prompts, order, limits, cost)
    step.seconds = max(step.seconds, 1.5 * step.taken())
    for task in prompts:
        counts[id(task)] = step.give(task)
    return [ScheduledTokens(t, counts[id(t)]) for t in tasks if counts.get(id(t))]


def _step_s(
    effective: int,
    decoding: Sequence[Task],
    prompts: Sequence[Task],
    order: Order,
    limits: Limits,
    cost: StepCost,
) -> float:
    """Return what a step may take in which *prompts* of a class are read.

    Those of the lowest class keep to `LOW_STEP` of `step_target_s`, as whoever arrives comes before
    them, and waits for a whole step before his own. Others keep to `step_target_s` for the sake of
    decoding tasks of a higher class, or of their own; but tasks of one burst wait for each other: a
    stream for those that got their slots at most `step_alone_s` after its first token, if that
    takes no longer than `burst_s`.
    """
    highest = max(map(order.effective, decoding), default=-1)
    if effective == 0:
        return LOW_STEP * limits.step_target_s
    if highest > effective:
        return limits.step_target_s
    if highest < effective:
        return limits.step_alone_s
    equals = [t for t in decoding if order.effective(t) == effective]
    begun_at = min(t.begun_at or 0.0 for t in equals)
    left = Load.of([(t.computed, t.pending) for t in prompts])
    late = begun_at + limits.step_alone_s < max(t.leased_at for t in prompts)
    if late or cost.predict(left) > limits.burst_s:
        return limits.step_target_s
    return max(limits.step_target_s, limits.step_alone_s)


LOW_STEP = 2 / 3
"""What a step may take in which prompts of the lowest class are read, of `step_target_s`."""

FIRST_STEP_TOKENS = 32
"""Prompt tokens of the very first step, before anything is known of the machine."""


CHUNK_MIN = 8
"""A chunk of fewer tokens, after which the prompt goes on, is not worth its own cost."""


class Step:
    """A step that is being filled: with chunks (position, count), up to a predicted time."""

    def __init__(self, chunks: list[tuple[int, int]], cost: StepCost):
        self.chunks, self.cost = chunks, cost
        self.seconds = 0.0
        self.tokens_left = 0
        self.tokens_least = 0

    def taken(self) -> float:
        """Return the seconds that the step takes so far."""
        return self.cost.predict(Load.of(self.chunks))

    def give(self, task: Task) -> int:
        """Give *task* as many tokens as fit, but the least that the prompts are due.

        Each chunk has a cost of its own: the last tokens of a prompt go along with those before
        them, and a prompt does not begin with a few.
        """
        most = min(task.pending, task.tokens_to_stop(), self.tokens_left)
        count = max(self._fitting(task.computed, most), min(most, self.tokens_least))
        if most - count <= count // 4:
            count = most
        elif count < CHUNK_MIN:
            count = 0
        if count:
            self.chunks.append((task.computed, count))
            self.tokens_left -= count
            self.tokens_least = max(0, self.tokens_least - count)
        return count

    def _fitting(self, position: int, most: int) -> int:
        """Return the greatest count, up to *most*, with which the step keeps to its time."""

        def seconds(count: int) -> float:
            return self.cost.predict(Load.of([*self.chunks, (position, count)]))

        return bisect_right(range(1, most + 1), self.seconds, key=seconds)

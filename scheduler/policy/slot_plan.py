"""Plans of slots: functions of the engine's state, without model or clock.

`plan_slots` decides which tasks get, keep and lose a slot; it changes only `Task.boost`. `Leaders`
finds the running task whose prompt a waiting task can reuse.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...backends.base import KvKind
from ...backends.media import cut_point
from ..kv.slots import Slot, StateSearch
from ..owner import PRIORITY_MAX
from ..prefix import common_prefix
from ..settings import EngineSettings
from ..task import Task
from .guarantees import Part
from .order import Order


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The tasks to *park* first, and those to *start* then. Each pair of *follow* is a task and the
    leader that it waits for.
    """

    park: tuple[Task, ...] = ()
    start: tuple[Task, ...] = ()
    follow: tuple[tuple[Task, Task], ...] = ()


def plan_slots(
    queue: Sequence[Task],
    slots: Sequence[Slot],
    order: Order,
    settings: EngineSettings,
    now: float,
    find_leader: Callable[[Task, Sequence[Task]], Task | None] = lambda task, running: None,
) -> SlotPlan:
    """Decide, in the order of the queue, which tasks are parked and which get a slot. Users with
    fewer slots come first.

    A task preempts a running one at once if

    - its own class is above the other's effective class,
    - it has a reserved quantum,
    - the other was not read for `reader_lag_s`, or waits for the embeddings of an image,
    - the other's user would still not have fewer slots than its own, by weight, or
    - its owner has no slot, and is further behind than the other's, by `slot_lag_s`.

    Otherwise it preempts one whose quantum has ended, if its effective class is higher, or equal
    and its owner was not served more. *find_leader* returns the running task that computes a prefix
    of the given task, which then takes no slot until the prefix is computed.

    No task is parked by a plan that starts one which it would preempt at once.
    """
    staying = [s.task for s in slots if s.task is not None]
    # A user has nothing from a slot whose task waits for embeddings.
    claims = _Claims(queue, [t for t in staying if not t.awaits_media], order)
    free = len(slots) - len(staying)
    park: list[Task] = []
    start: list[Task] = []
    follow: list[tuple[Task, Task]] = []
    while (task := claims.next_task()) is not None:
        leader = find_leader(task, staying + start)
        if leader is not None:
            follow.append((task, leader))
            leader.boost = max(leader.boost, order.effective(task))
            continue
        if free:
            free -= 1
        else:
            victim = _victim(task, staying, order, settings, now, claims)
            if victim is None:
                settled = [order.resistance(t, task) for t in staying if not t.shift_pending]
                claims.drop_behind(task, min(settled, default=PRIORITY_MAX))
                continue
            staying.remove(victim)
            park.append(victim)
            if not victim.awaits_media:
                claims.count_slot(victim, -1)
        start.append(task)
        claims.count_slot(task, 1)
    _keep_preempting(park, start, order, settings, now)
    if start:
        placed = {id(task) for task in (*start, *(task for task, _ in follow))}
        _start_preempting([t for t in queue if id(t) not in placed], start, order)
    return SlotPlan(tuple(park), tuple(start), tuple(follow))


def _keep_preempting(
    park: list[Task], start: list[Task], order: Order, settings: EngineSettings, now: float
) -> None:
    """Remove each task from *park* that would preempt one in *start* at once, and that one from
    *start*. A user's task could lose its slot to an urgent one while a task of a lower class of
    that user gets a slot of another user, who has too many.
    """
    able = [t for t in park if not (t.awaits_media or reader_lags(t, settings, now))]
    for parked in sorted(able, key=order.key):
        lower = [t for t in start if order.preempts(parked, t)]
        if lower:
            park.remove(parked)
            start.remove(max(lower, key=order.key))


def _start_preempting(waiting: list[Task], start: list[Task], order: Order) -> None:
    """Replace each task in *start* that one of the *waiting* tasks would preempt at once by that
    one. A task of a user without slots comes first by its age, which an urgent task of another user
    disregards.
    """
    able = [t for t in waiting if t.has_work or t.wants_token]
    for index, task in enumerate(start):
        above = [t for t in able if order.preempts(t, task)]
        if above:
            start[index] = min(above, key=order.key)
            able.remove(start[index])


class _Claims:
    """The waiting tasks of each user in their order, and the slots that each part of the users has.
    The next task is that of the first user, by the slots in use for each unit of weight.
    """

    def __init__(self, queue: Sequence[Task], running: Sequence[Task], order: Order):
        self._order, self._guarantees = order, order.guarantees
        waiting = sorted((t for t in queue if t.has_work or t.wants_token), key=order.key)
        self._users: dict[int, deque[Task]] = {}
        for task in waiting:
            self._users.setdefault(self._user_of(task), deque()).append(task)
        self._keys: dict[int, tuple[float, ...]] = {}
        """The keys of the users' first tasks; empty after each change of slots."""
        self._most: float | None = None
        """The most slots of a part for each unit of weight, less one slot; None if not known."""
        self._slots: Counter[Part] = Counter()
        for task in running:
            self.count_slot(task, 1)

    def count_slot(self, task: Task, change: int) -> None:
        """Count a slot that *task* gets or loses."""
        for part in self._guarantees.parts.get(task.spec.owner, ()):
            self._slots[part] += change
        self._keys.clear()
        self._most = None

    def _user_of(self, task: Task) -> int:
        """Return the user by which *task* is grouped: one for all if nobody shares the model."""
        return task.spec.owner.user if self._guarantees.parts else 0

    def next_task(self) -> Task | None:
        """Remove and return the next task, if there is one."""
        if not self._users:
            return None
        user = (
            min(self._users, key=self._user_key)
            if len(self._users) > 1
            else next(iter(self._users))
        )
        task = self._users[user].popleft()
        self._keys.pop(user, None)
        if not self._users[user]:
            del self._users[user]
        return task

    def _user_key(self, user: int) -> tuple[float, ...]:
        if user not in self._keys:
            self._keys[user] = self._key(self._users[user][0])
        return self._keys[user]

    def _key(self, task: Task) -> tuple[float, ...]:
        order, parts = self._order, self._guarantees.parts.get(task.spec.owner, ())
        used = [self._used(part, 0) for part in parts[:2]]
        return (order.yields(task), -order.level(task), *used, *order.key(task))

    def drop_behind(self, task: Task, floor: int) -> None:
        """Drop the tasks that cannot preempt, as *task* cannot: those behind it of its user whose
        own class is not above *floor*. If its account has no slots, those of other accounts without
        slots too, as they come later and are not weightier.
        """
        own, weight = self._user_of(task), self._weight_without_slots(task)
        for user in [*self._users]:
            other = self._weight_without_slots(self._users[user][0])
            if user == own or (weight and 0 < other <= weight):
                kept = deque(t for t in self._users.pop(user) if t.spec.priority > floor)
                self._keys.pop(user, None)
                if kept:
                    self._users[user] = kept

    def _weight_without_slots(self, task: Task) -> float:
        """Return the weight of the account of *task*; 0.0 if it has slots, or none counts because
        classes come before users.
        """
        parts = self._guarantees.parts.get(task.spec.owner)
        if parts is None or self._order.strict or self._slots[parts[0]]:
            return 0.0
        return self._guarantees.weights[parts[0]]

    def has_too_many(self, running: Task, task: Task) -> bool:
        """Return whether the user of *running* would still have as many slots as that of *task*,
        by weight, after one of its slots went to *task*.
        """
        rivals = self._guarantees.rivals(running.spec.owner, task.spec.owner)
        if rivals is None or running.spec.owner.user == task.spec.owner.user:
            return False
        return self._used(rivals[0], -1) >= self._used(rivals[1], 1)

    def may_have_too_few(self, task: Task) -> bool:
        """Return whether `has_too_many` can be true for any running task. It is for few users, and
        there are many pairs of users.
        """
        if self._most is None:
            self._most = max((self._used(part, -1) for part in self._slots), default=0.0)
        parts = self._guarantees.parts.get(task.spec.owner, ())
        return any(self._used(part, 1) <= self._most for part in parts)

    def lacks_slots(self, task: Task) -> bool:
        """Return whether `has_none` can be true for any running task."""
        parts = self._guarantees.parts.get(task.spec.owner, ())
        return not all(self._slots[part] for part in parts)

    def has_none(self, task: Task, running: Task) -> bool:
        """Return whether the user of *task* (beside tasks of that user, the label) has no slot."""
        rivals = self._guarantees.rivals(task.spec.owner, running.spec.owner)
        return rivals is not None and not self._slots[rivals[0]]

    def _used(self, part: Part, change: int) -> float:
        """Return the slots of a part for each unit of its weight, after a *change*."""
        return (self._slots[part] + change) / self._guarantees.weights[part]


def _victim(
    task: Task,
    running: Sequence[Task],
    order: Order,
    settings: EngineSettings,
    now: float,
    claims: _Claims,
) -> Task | None:
    def last(tasks: Iterable[Task]) -> Task | None:
        """Return the task that is parked first: of the lowest class, the latest arrival."""
        return min(
            tasks,
            key=lambda t: (order.class_beside(t, task), order.effective(t), -t.arrival),
            default=None,
        )

    owner, running = task.spec.owner, [t for t in running if not t.shift_pending]
    unable = last(t for t in running if t.awaits_media or reader_lags(t, settings, now))
    if unable is not None:
        return unable
    running = [t for t in running if not t.reserved_tokens]
    lower = last(t for t in running if task.reserved_tokens or order.preempts(task, t))
    if lower is not None:
        return lower
    if claims.may_have_too_few(task):
        over_share = last(
            t for t in running if claims.has_too_many(t, task) and not order.outclasses(t, task)
        )
        if over_share is not None:
            return over_share
    if claims.lacks_slots(task):
        lead_s = order.guarantees.lead_s
        ahead = [
            t
            for t in running
            if lead_s(owner, t.spec.owner) >= settings.slot_lag_s
            and claims.has_none(task, t)
            and not order.is_above(t, task)
        ]
        if ahead:
            return min(ahead, key=lambda t: (-lead_s(owner, t.spec.owner), -t.arrival))
    done = [
        t
        for t in running
        if t.quantum >= settings.quantum_tokens
        and order.rank(task) <= order.rank(t)
        and not order.preempts(t, task)  # once parked, it would take the slot back
    ]
    last_done = max(done, key=order.key, default=None)
    if last_done is None:
        return None
    # Once parked, it would preempt these at once.
    return last(t for t in running if order.preempts(last_done, t)) or last_done


def awaits_reader(task: Task, settings: EngineSettings, now: float) -> bool:
    """Return whether *task* has a slot and its reader is away for a moment."""
    away = task.unread_since is not None
    return away and task.slot >= 0 and not reader_lags(task, settings, now)


def reader_lags(task: Task, settings: EngineSettings, now: float) -> bool:
    """Return whether *task* has reported nothing for so long that it gives way to any other."""
    return task.unread_since is not None and now >= task.unread_since + settings.reader_lag_s


OTHERS_MAX = 256
"""Number of tasks with which a task's common prefix is remembered: the most slots of a model."""


def prefix_hash_of(task: Task, shared_prefix_tokens_min: int) -> int:
    """Return a hash of the first tokens of *task*; 0 if it cannot share a prefix."""
    if task.ignores_cache or len(task.tokens) <= shared_prefix_tokens_min:
        return 0
    prefix = tuple(task.tokens[:shared_prefix_tokens_min])
    return hash((task.scope, task.spec.adapters, prefix)) or 1


class Leaders:
    """Finds the leader of each waiting task; owned by the engine."""

    def __init__(self, search: StateSearch, kv_kind: KvKind, shared_prefix_tokens_min: int):
        self._search, self._kv_kind = search, kv_kind
        self._shared_tokens_min = shared_prefix_tokens_min
        self._cached: dict[int, tuple[int, int]] = {}
        """By task, `changes` of the search, and the number of cached tokens at that time."""
        self._shared: dict[int, dict[int, int]] = {}
        """By task, the length of its common prefix with each other task."""

    def find_leader(self, task: Task, running: Sequence[Task]) -> Task | None:
        """Return the *running* task that *task* should wait for, if any, and have the leader's
        state saved at the end of their common prefix.

        A task waits while the leader computes a prompt with a common prefix that is at least
        `shared_prefix_tokens_min` longer than the cached one. It loses no time by this: two tasks
        that share the steps would not compute the prefix faster, and the leader gets the class of
        the tasks that wait for it.
        """
        if not task.prefix_hash or task.computed or task.shifted:
            return None
        best, end = None, 0
        for other in running:
            if other.prefix_hash == task.prefix_hash and other.prefilling and not other.shifted:
                shared = self._common(task, other)
                if shared > max(other.computed, end):
                    best, end = other, shared
        if best is None:
            return None
        gain = end - self._cached_tokens(task, best)
        if gain <= 0 or (gain < self._shared_tokens_min and not task.follows):
            return None  # a task that already waits does so until the whole prefix is computed
        best.checkpoints.add(end)
        return best

    def _common(self, task: Task, other: Task) -> int:
        shared, number = self._shared.setdefault(task.spec.id, {}), other.spec.id
        if number not in shared:
            if len(shared) >= OTHERS_MAX:
                shared.clear()
            most = min(len(task.tokens) - 1, other.prompt_size)
            common = min(common_prefix(task.tokens, other.tokens), most)
            shared[number] = cut_point(task.tokens, common)
        return shared[number]

    def _cached_tokens(self, task: Task, other: Task) -> int:
        """Return how many tokens *task* could reuse if it did not wait for *other*."""
        copied = other.computed if self._kv_kind == "plain" else 0
        changes = self._search.changes
        known = self._cached.get(task.spec.id)
        if known is None or known[0] != changes:
            cached = self._search.find_source(task.origin, array("i", task.tokens)).keep
            known = self._cached[task.spec.id] = changes, cached
        return max(copied, known[1])

    def forget_task(self, task: Task) -> None:
        """Forget a task that has ended."""
        self._cached.pop(task.spec.id, None)
        self._shared.pop(task.spec.id, None)

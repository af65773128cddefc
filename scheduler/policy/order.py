"""The order in which tasks are served, and the quanta reserved for tasks of lower classes; and that
of requests for texts: by class with ageing, then fair among owners, then by arrival.

Pure, as in `batch_plan`: the tokens computed so far and the time are passed in. Without the
reserved quanta, a task of a lower class could wait for ever. Waiting texts age by the work that is
done for others meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from ..owner import PRIORITY_MAX, Owner, OwnerClock, Priority, Requester
from ..settings import EngineSettings
from ..task import Task
from .guarantees import NO_GUARANTEES, Guarantees


class Order:
    """The order of tasks. A task with a reserved quantum comes first, tasks parked by hand come
    last. Places follow the order of arrival; a task that is parked after a quantum gets a new last
    place.

    Users come in the order of their guarantees (`Guarantees`): first users who are further behind,
    then users for whom fewer tokens were computed. Of one user's tasks, the effective class counts
    first, then the labels in the same way, then the place. So a class has no effect on other users,
    except for `urgent`, which an operator must grant. With the setting `priority_strict` the
    effective class counts before the users.
    """

    def __init__(
        self,
        clock: int,
        owners: OwnerClock,
        settings: EngineSettings,
        shares: Guarantees = NO_GUARANTEES,
    ):
        self._clock, self._owners, self._settings = clock, owners, settings
        self.guarantees = shares
        self.strict = settings.priority_strict
        self._levels: dict[Owner, int] = {}
        self._owner_ranks: dict[Owner, tuple[tuple[float, ...], tuple[float, ...]]] = {}
        """The parts of the rank before and after the class, by owner: queues are long."""

    def effective(self, task: Task) -> int:
        """Return the class of *task*, raised by its age; the highest in a reserved quantum."""
        if task.reserved_tokens:
            return PRIORITY_MAX
        return self.effective_unreserved(task)

    def effective_unreserved(self, task: Task) -> int:
        """Return the class of *task*, raised by its age, without regard to a reserved quantum."""
        return task.effective_class(self._clock, self._settings.ageing_tokens)

    def level(self, task: Task) -> int:
        """Return the class of *task* as it counts beside tasks of other users. Users are equal,
        except that tasks with a reserved quantum, of users with urgent tasks, and of users who are
        far behind their guarantee come first.
        """
        if self.strict:
            return self.effective(task)
        return Priority.URGENT if task.reserved_tokens else self._owner_level(task.spec.owner)

    def level_in_account(self, task: Task) -> int:
        """Return the class of *task* as it counts beside tasks of other users of its account."""
        if not self.strict and self.guarantees.is_starved_in_account(task.spec.owner):
            return Priority.URGENT
        return self.level(task)

    def _owner_level(self, owner: Owner) -> int:
        level = self._levels.get(owner)
        if level is None:
            shares = self.guarantees
            urgent = owner.user in shares.urgent_users or shares.is_starved(owner)
            level = self._levels[owner] = Priority.URGENT if urgent else Priority.NORMAL
        return level

    def class_beside(self, task: Task, other: Task) -> int:
        """Return the class of *task* as it counts beside *other*."""
        own, others = task.spec.owner, other.spec.owner
        if own.user == others.user:
            return self.effective(task)
        if self.guarantees.share_account(own, others):
            return self.level_in_account(task)
        return self.level(task)

    def is_above(self, task: Task, other: Task) -> bool:
        """Return whether the class of *task* is above that of *other*."""
        return self.class_beside(task, other) > self.class_beside(other, task)

    def outclasses(self, task: Task, other: Task) -> bool:
        """Return whether *task* is above *other* by its class, and not only because its user is
        starved. A user who is starved needs time, but no more slots than others.
        """
        one_user = self.strict or task.spec.owner.user == other.spec.owner.user
        urgent = task.reserved_tokens or task.spec.owner.user in self.guarantees.urgent_users
        return bool(one_user or urgent) and self.is_above(task, other)

    def highest(self, tasks: Iterable[Task]) -> list[Task]:
        """Return a task of the highest class of each user."""
        found: dict[int, Task] = {}
        for task in tasks:
            best = found.get(task.spec.owner.user)
            if best is None or self.effective(task) > self.effective(best):
                found[task.spec.owner.user] = task
        return list(found.values())

    def preempts(self, task: Task, running: Task) -> bool:
        """Return whether *task* takes the slot of *running* at once, by its own class. Age does not
        count, or an old low task and a new urgent one would preempt each other again and again.
        """
        own, others = task.spec.owner, running.spec.owner
        if own.user != others.user and task.spec.priority < Priority.URGENT and not self.strict:
            return False
        return task.spec.priority > self.resistance(running, task)

    def resistance(self, running: Task, task: Task) -> int:
        """Return the class that tasks of the user of *task* must exceed to preempt *running*."""
        if self.strict or task.spec.owner.user == running.spec.owner.user:
            return self.effective(running)
        precious = (
            running.reserved_tokens
            or running.spec.priority == Priority.URGENT
            or self.guarantees.keeps_slot(running.spec.owner, task.spec.owner)
        )
        return Priority.URGENT if precious else Priority.HIGH

    def age(self, task: Task) -> int:
        """Return the age of *task* in tokens."""
        return task.age_at(self._clock)

    def yields(self, task: Task) -> bool:
        """Return whether *task* was parked by hand and still gives way to all others."""
        return task.yields(self._clock)

    def key(self, task: Task) -> tuple[float, ...]:
        """Return the sort key of *task*; the least goes first."""
        return (self.yields(task), *self.rank(task), task.queue_number)

    def rank(self, task: Task) -> tuple[float, ...]:
        """Return the part of `key` before the place; tasks of equal rank alternate by quanta."""
        if task.reserved_tokens:
            return (-PRIORITY_MAX - 1,)
        owner, effective = task.spec.owner, self.effective_unreserved(task)
        ranks = self._owner_ranks.get(owner)
        if ranks is None:
            ranks = self._owner_ranks[owner] = self._owner_rank(owner)
        user, label = ranks
        return (-effective, *user, *label) if self.strict else (*user, -effective, *label)

    def _owner_rank(self, owner: Owner) -> tuple[tuple[float, ...], tuple[float, ...]]:
        account_s, user_s, label_s = self.guarantees.behind_of(owner)
        user, label = self._owners.served(owner)
        level = () if self.strict else (-self._owner_level(owner),)
        return (*level, -account_s, -user_s, user), (-label_s, label)

    def served(self, task: Task) -> tuple[int, int]:
        """Return the tokens served to the user of *task*, and those served to the label."""
        return self._owners.served(task.spec.owner)


K = TypeVar("K", int, Owner)

CHECK_S = 0.1
"""The time between two checks of all tasks while no quantum can be given."""


class ReservedQuanta:
    """Gives one quantum in `reserved_share` to a task of a lower class that was passed over for
    `passed_over_s`. Users alternate, and so do the labels of a user. Of one label, the task that
    waits longest gets the quantum.

    Ageing by tokens alone would take minutes on a slow machine. Owned by the engine.
    """

    OWNERS_MAX = 4096

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.next_at = 0
        """The token clock at which the next quantum is due."""
        self._next_check_at = 0.0
        self._given = 0
        self._last_of_user: dict[int, int] = {}
        """By user, the number of the last quantum."""
        self._last_of_owner: dict[Owner, int] = {}

    def is_check_due(self, clock: int, now: float) -> bool:
        """Return whether a quantum is due, and the last check was `CHECK_S` ago or more."""
        return clock >= self.next_at and now >= self._next_check_at

    def give_quantum(
        self, able: Iterable[Task], busy: Iterable[Task], order: Order, clock: int, now: float
    ) -> None:
        """Give the due quantum to one of the *able* tasks, which could compute, if its class is
        below that of one of the *busy* tasks. Call this if `is_check_due`. A text to embed gets a
        quantum of its whole size, because otherwise it would start again.
        """
        self._next_check_at = now + CHECK_S
        since, size = now - self._settings.passed_over_s, self._settings.quantum_tokens
        late = [t for t in able if t.passed_over_since <= since and not t.reserved_tokens]
        if not late:
            return
        highest = order.highest(busy)
        late = [t for t in late if any(order.is_above(above, t) for above in highest)]
        if late:
            task = min(late, key=self._key)
            task.reserved_tokens = max(size, task.pending) if task.spec.embed else size
            self.next_at = clock + self._settings.reserved_share * size
            self._note_given(task.spec.owner)

    def _key(self, task: Task) -> tuple[int, int, float, int]:
        owner = task.spec.owner
        last = self._last_of_user.get(owner.user, 0), self._last_of_owner.get(owner, 0)
        return (*last, task.computed_at, task.arrival)

    def _note_given(self, owner: Owner) -> None:
        self._given += 1
        self._note_last(self._last_of_user, owner.user)
        self._note_last(self._last_of_owner, owner)

    def _note_last(self, last: dict[K, int], key: K) -> None:
        last.pop(key, None)
        last[key] = self._given
        if len(last) > self.OWNERS_MAX:
            del last[next(iter(last))]


T = TypeVar("T")

AGEING_S = 1.0
"""A request rises by one class each time that this much work was done since it arrived."""

URGENT_LEAD_S = 1.0
"""Urgent requests of a user precede those of others until the user had this much more of work."""


class _WaitingText(NamedTuple, Generic[T]):
    request: T
    arrival: int
    work_us: int
    """The work that was done before it arrived."""


class TextOrder(Generic[T]):
    """Requests in lines, one for each owner and class, so that lines are few.

    With *strict*, a class precedes the lower ones of all users. Otherwise it precedes those of its
    own user, and only `urgent` precedes others' requests, until its user had `URGENT_LEAD_S` more
    of work than another.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._lines: dict[Requester, deque[_WaitingText[T]]] = {}
        self._owners = OwnerClock()
        """Microseconds of work for each owner."""
        self._work_us = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def users(self) -> set[int]:
        """The users whose requests wait."""
        return {requester.owner.user for requester in self._lines}

    def add_request(self, requester: Requester, request: T) -> None:
        """Add a request behind the others of its owner and class."""
        line = self._lines.get(requester)
        if line is None:
            self._owners.add_owner(requester.owner, [r.owner for r in self._lines])
            line = self._lines[requester] = deque()
        line.append(_WaitingText(request, self._arrivals, self._work_us))
        self._arrivals += 1

    def next_requester(self, may: Callable[[Requester], bool] | None = None) -> Requester | None:
        """Return the requester whose request is next, of those that *may* be answered, or all."""
        if not self._lines:
            return None
        if len(self._lines) == 1:
            [only] = self._lines
            return only if may is None or may(only) else None
        able = list(self._lines if may is None else filter(may, self._lines))
        least_us = min((self._owners.served(r.owner)[0] for r in able), default=0)
        return min(able, key=lambda requester: self._key(requester, least_us), default=None)

    def _key(self, requester: Requester, least_us: int) -> tuple[int, ...]:
        """Return the sort key of a line; *least_us* is the work for the user who had least."""
        first = self._lines[requester][0]
        aged = requester.priority + (self._work_us - first.work_us) // round(1e6 * AGEING_S)
        level, (user, label) = min(PRIORITY_MAX, aged), self._owners.served(requester.owner)
        if self._strict:
            return (-level, user, 0, label, first.arrival)
        may_lead = user - least_us < round(1e6 * URGENT_LEAD_S)
        urgent = requester.priority == Priority.URGENT and may_lead
        return (-urgent, user, -level, label, first.arrival)

    def first_request(self, requester: Requester) -> T:
        """Return the first request of a line, which stays there."""
        return self._lines[requester][0].request

    def remove_first(self, requester: Requester) -> T:
        """Remove and return the first request of a line."""
        line = self._lines[requester]
        first = line.popleft()
        if not line:
            del self._lines[requester]
        return first.request

    def remove_requests(self, is_removed: Callable[[T], bool]) -> None:
        """Remove the requests for which *is_removed* is true."""
        for requester, line in list(self._lines.items()):
            kept = deque(text for text in line if not is_removed(text.request))
            if not kept:
                del self._lines[requester]
            elif len(kept) < len(line):
                self._lines[requester] = kept

    def count_work(self, owner: Owner, seconds: float) -> None:
        """Count work that was done for *owner*."""
        worked_us = round(1e6 * seconds)
        self._work_us += worked_us
        self._owners.count_work(owner, worked_us)

"""The quanta that are reserved for tasks of lower classes, so that no task waits for ever.

Pure, as in `batch_plan`: the tokens computed so far and the time are passed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from ..owner import Owner
from ..settings import EngineSettings
from ..task import Task
from .order import Order

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

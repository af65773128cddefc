"""The order in which tasks are served."""

from __future__ import annotations

from ..owner import OwnerClock
from ..priority import PRIORITY_MAX
from ..settings import EngineSettings
from ..task import Task


class Order:
    """The order of tasks: by effective class, tokens served to the user, tokens served to the
    label, and place. A task with a reserved quantum comes first, tasks parked by hand come last.

    Places follow the order of arrival. A task that is parked after a quantum gets a new last place.
    """

    def __init__(self, clock: int, owners: OwnerClock, settings: EngineSettings):
        self._clock, self._owners, self._settings = clock, owners, settings

    def effective(self, task: Task) -> int:
        """Return the class of *task*, raised by its age; the highest in a reserved quantum."""
        if task.reserved_tokens:
            return PRIORITY_MAX
        return self.effective_unreserved(task)

    def effective_unreserved(self, task: Task) -> int:
        """Return the class of *task*, raised by its age, without regard to a reserved quantum."""
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
        """Return the part of `key` before the place; tasks of equal rank alternate by quanta."""
        if task.reserved_tokens:
            return -PRIORITY_MAX - 1, 0, 0
        return (-self.effective(task), *self.served(task))

    def served(self, task: Task) -> tuple[int, int]:
        """Return the tokens served to the user of *task*, and those served to the label."""
        return self._owners.served(task.spec.owner)

"""The priority classes, by number and by name.

Numbers are compared and sent to the workers; programs, users and files use the names. Clients have
the names in `ipc.priorities`, and tests/ipc/test_priorities.py lists all further copies.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from .owner import Owner


class Priority(IntEnum):
    """The class of a turn in the queue: a higher one runs first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    URGENT = 3

    @property
    def label(self) -> str:
        """The name that clients, the configuration and the metrics use."""
        return self.name.lower()


class Requester(NamedTuple):
    """The owner and the class of a request."""

    owner: Owner
    priority: Priority = Priority.NORMAL


PRIORITIES = {priority.label: priority for priority in Priority}
"""The classes by name, the lowest first."""
PRIORITY_MAX = max(Priority)

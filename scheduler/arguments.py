"""Arguments of calls that the daemon and the workers check: priorities and timeouts."""

from __future__ import annotations

from ..backends.errors import InvalidArgument
from .owner import PRIORITIES, Priority

TIMEOUT_S_MAX = 30 * 86_400.0


def priority_of(name: str) -> Priority | None:
    """Return the priority of a name, or None for an empty name, which means the session's.

    :raises InvalidArgument: there is no such priority.
    """
    if not name:
        return None
    if name not in PRIORITIES:
        raise InvalidArgument(
            f"there is no priority {name[:50]!r}", hint=f"use one of {', '.join(PRIORITIES)}"
        )
    return PRIORITIES[name]


def seconds_of(value: float) -> float:
    """Return a timeout; 0 means none.

    :raises InvalidArgument: the value is negative, too large or not a number.
    """
    if not 0 <= value <= TIMEOUT_S_MAX:
        raise InvalidArgument(
            f"the timeout {value} s is out of range",
            hint=f"use 0 (none) to {TIMEOUT_S_MAX:.0f} seconds",
        )
    return value

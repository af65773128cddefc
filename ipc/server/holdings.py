"""The number and bytes of things that users let a server hold, and their bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple

from ...backends.errors import Busy, QuotaExceeded

RETRY_AFTER_S = 1.0


class HoldingLimits(NamedTuple):
    """The bounds of one user's things, and of the bytes of all users' (*bytes_max*)."""

    user_max: int = 0
    user_bytes_max: int = 0
    bytes_max: int = 0


class Holdings:
    """The counts by user of one kind of thing, whose settings begin with *name*. Owned by the
    server's event loop.
    """

    def __init__(self, name: str):
        self.limits = HoldingLimits()
        """Those of the configuration."""
        self._name = name
        self._counts: Counter[Hashable] = Counter()
        self._bytes: Counter[Hashable] = Counter()

    @property
    def count(self) -> int:
        """The things of all users."""
        return self._counts.total()

    @property
    def total_bytes(self) -> int:
        """Their bytes."""
        return self._bytes.total()

    def check_growth(self, user: Hashable, number: int, size: int) -> None:
        """Check that a user may have *number* more things, with *size* bytes in total.

        :raises QuotaExceeded: they would be too many or too large.
        :raises Busy: those of all users would be too large.
        """
        limits, count, held = self.limits, self._counts[user], self._bytes[user]
        things = f"{self._name.replace('-', ' ')}s"
        if count + number > limits.user_max:
            bound, key = f"{self._name}s-user-max", things.rpartition(" ")[2]
            raise QuotaExceeded(
                f"you have {count} {things}; the limit is {limits.user_max}",
                hint=f"free those that are done, or raise {bound}",
                data={"bound": bound, key: count, f"{key}_max": limits.user_max},
            )
        if held + size > limits.user_bytes_max:
            bound = f"{self._name}-bytes-user-max"
            raise QuotaExceeded(
                f"your {things} have {held} bytes; {size} more would exceed the limit of"
                f" {limits.user_bytes_max}",
                hint=f"free those that are done, or raise {bound}",
                data=_sizes(bound, held, size, limits.user_bytes_max),
            )
        if (total := self.total_bytes) + size > limits.bytes_max:
            bound = f"{self._name}-bytes-max"
            sizes = _sizes(bound, total, size, limits.bytes_max)
            raise Busy(
                f"the {things} of all users have {total} bytes; {size} more would exceed the limit"
                f" of {limits.bytes_max}",
                hint=f"try again later, or raise {bound}",
                data=sizes | {"retry_after_s": RETRY_AFTER_S},
            )

    def add(self, user: Hashable, number: int, size: int) -> None:
        """Check and count *number* more things of a user; see `check_growth`."""
        self.check_growth(user, number, size)
        self._counts[user] += number
        self._bytes[user] += size

    def remove(self, user: Hashable, size: int) -> None:
        """Uncount one of a user, of *size* bytes."""
        self._counts[user] -= 1
        self._bytes[user] -= size
        if not self._counts[user]:
            del self._counts[user], self._bytes[user]


def _sizes(bound: str, held: int, more: int, bytes_max: int) -> dict[str, Any]:
    return {"bound": bound, "bytes": held, "more": more, "bytes_max": bytes_max}

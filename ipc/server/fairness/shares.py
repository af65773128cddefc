"""Limits that the users of the daemon share, so that no user can take everything."""

from __future__ import annotations

from collections import Counter


class SharedLimit:
    """A limit on an amount that users share: places, or bytes.

    A user may hold at most *factor* times as much as is free (the dynamic thresholds of Choudhury
    and Hahne, 1998). One user alone reaches `factor / (factor + 1)` of the limit, each further
    user less, and something is always left for a user who has nothing yet.
    """

    def __init__(self, total_max: int, factor: int = 1):
        self.total_max, self.total = total_max, 0
        self._factor = factor
        self._held: Counter[int] = Counter()

    def fits(self, uid: int, amount: int) -> bool:
        """Return whether a user may take *amount* more."""
        free = self.total_max - self.total
        return amount <= free and self._held[uid] + amount <= self._factor * free

    def held_by(self, uid: int) -> int:
        """Return the amount that a user holds."""
        return self._held[uid]

    @property
    def largest(self) -> int:
        """The amount that the user with the most holds."""
        return max(self._held.values(), default=0)

    def take_amount(self, uid: int, amount: int) -> None:
        """Add to a user's amount; a negative *amount* is given back."""
        self._held[uid] += amount
        self.total += amount
        if not self._held[uid]:
            del self._held[uid]

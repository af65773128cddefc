"""The part of a user's bound that one label of the user may have.

Labels share a user's bound fairly among the user's own programs. The bound holds for all of them
together.
"""

from __future__ import annotations

from collections import Counter

from ...scheduler.owner import Owner


class OwnerCounts:
    """Amounts by owner, and their sums by user. Zeros are not stored."""

    def __init__(self) -> None:
        self._users: Counter[int] = Counter()
        self._owners: Counter[Owner] = Counter()

    def add(self, owner: Owner, amount: int) -> None:
        """Add *amount*, which may be negative."""
        self._users[owner.user] += amount
        self._owners[owner] += amount
        if not self._users[owner.user]:
            del self._users[owner.user]
        if not self._owners[owner]:
            del self._owners[owner]

    def of(self, owner: Owner) -> int:
        """Return the amount of one owner."""
        return self._owners[owner]

    def of_user(self, user: int) -> int:
        """Return the amount of all labels of a user."""
        return self._users[user]

    def total(self) -> int:
        """Return the amount of all users."""
        return self._users.total()

    def users(self) -> Counter[int]:
        """Return the amounts by user."""
        return self._users

    def __len__(self) -> int:
        return len(self._owners)


def exceeds_share(counts: OwnerCounts, owner: Owner, more: int, limit: int) -> bool:
    """Return whether a label with *more* would have more than now is free of its user's *limit*
    (the dynamic thresholds of Choudhury and Hahne, 1998). So one label alone reaches half, and
    something is always left for another. A program without a label may use the whole.
    """
    if not owner.label:
        return False
    return counts.of(owner) + more > limit - counts.of_user(owner.user)

"""The owners of sessions and tasks, and the priority classes.

Owners are users, and the labels by which a user's programs differ. The numbers of the classes are
compared and sent to the workers; programs, users and files use the names. Clients have the names in
`ipc.names`, and tests/ipc/test_priorities.py lists all further copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", int, "Owner")


class Owner(NamedTuple):
    """A user (a uid) and the label of one of the user's programs, or an empty label.

    All labels of a user share the user's KV states, compiled grammars, quarantine and quotas. They
    divide only the user's part of the work: first users share fairly, then the labels of one user.
    """

    user: int
    label: str = ""

    def includes(self, other: Owner) -> bool:
        """Return whether the sessions of *other* belong to this owner. An owner without a label has
        all sessions of the user.
        """
        return self.user == other.user and self.label in ("", other.label)

    def __str__(self) -> str:
        return f"{self.user}/{self.label}" if self.label else str(self.user)


class _Served(Generic[K]):
    """Tokens computed for each key. A key that returns is lifted to the least of the active ones,
    because idleness earns no credit (virtual token counter, Sheng et al., OSDI 2024).
    """

    def __init__(self) -> None:
        self.amounts: Counter[K] = Counter()

    def add(self, key: K, rivals: set[K], last: set[K]) -> None:
        """Register *key*, while its *rivals* have tasks. If there are none, *last* count."""
        if key not in rivals:
            floor = min((self.amounts[k] for k in rivals or last), default=0)
            self.amounts[key] = max(self.amounts[key], floor)

    def keep(self, keys: set[K], most: int) -> None:
        """Forget all but *keys* if there are more than *most*."""
        if len(self.amounts) > most:
            self.amounts = _only(self.amounts, keys)


def _only(amounts: Counter[K], keys: Container[K]) -> Counter[K]:
    return Counter({k: n for k, n in amounts.items() if k in keys})


class OwnerClock:
    """Tokens computed for each user, and for each label of a user. The user with the fewest goes
    first, and of one user the label with the fewest. So labels do not multiply a user's share. At
    most `OWNERS_MAX` users and as many labels are remembered.
    """

    OWNERS_MAX = 4096

    def __init__(self) -> None:
        self._users = _Served[int]()
        self._owners = _Served[Owner]()
        self._last_users = set[int]()
        """The users for whom tokens were computed last, here or on other nodes."""
        self._computed = Counter[int]()
        """Tokens computed here for each user, which never decrease while a user is remembered."""
        self._computed_since = Counter[int]()
        """Tokens computed here for each user since the last exchange."""

    def __len__(self) -> int:
        return max(len(self._users.amounts), len(self._owners.amounts))

    def add_owner(self, owner: Owner, active: Iterable[Owner]) -> None:
        """Register a task of *owner*, while *active* owners have tasks."""
        owners = set(active)
        if owner in owners:
            return
        if not owners and self._last_users == {owner.user} and owner in self._owners.amounts:
            return  # nothing changes: no owner has tasks, and this user's were computed last
        users = {o.user for o in owners}
        self._users.add(owner.user, users, self._last_users)
        self._owners.add(owner, {o for o in owners if o.user == owner.user}, set())
        self._users.keep(users | {owner.user} | self._last_users, self.OWNERS_MAX)
        self._owners.keep(owners | {owner}, self.OWNERS_MAX)
        if len(self._computed) > self.OWNERS_MAX:
            self._computed = _only(self._computed, self._users.amounts)
            self._computed_since = _only(self._computed_since, self._users.amounts)

    def count_work(self, owner: Owner, amount: int) -> None:
        """Count an *amount* of work that was done for *owner*."""
        self._users.amounts[owner.user] += amount
        self._owners.amounts[owner] += amount
        self._last_users = {owner.user}
        self._computed[owner.user] += amount
        self._computed_since[owner.user] += amount

    def exchange_users(
        self, elsewhere: Mapping[int, int], active: Iterable[Owner], lead_max: int
    ) -> dict[int, int]:
        """Count the tokens that other nodes of a fleet have computed for users since the last call,
        like those computed here, while *active* owners have work here.

        Only recent work counts: a user's lead over the least served active user fades while
        *lead_max* tokens are computed, and tokens from *elsewhere* raise no lead above *lead_max*.
        A user without work here is lifted like one that returns. A user who never had a task here
        is ignored.

        Return the tokens computed here so far, for each user with work or with tokens since the
        last call.
        """
        users, amounts = {owner.user for owner in active}, self._users.amounts
        since, self._computed_since = self._computed_since, Counter()
        elsewhere = {user: n for user, n in elsewhere.items() if user in amounts}
        if elsewhere:
            kept = max(0.0, 1 - (since.total() or sum(elsewhere.values())) / lead_max)
            least = min((amounts[user] for user in users or self._last_users), default=0)
            for user in users | elsewhere.keys():
                lead = round(max(0, amounts[user] - least) * kept)
                counted = min(lead + elsewhere.get(user, 0), lead_max)
                amounts[user] = least + max(lead, counted)
            self._last_users = set(elsewhere)
        return {user: self._computed[user] for user in users | since.keys()}

    def served(self, owner: Owner) -> tuple[int, int]:
        """Return the amounts computed for the user and the label of *owner*; least goes first."""
        return self._users.amounts[owner.user], self._owners.amounts[owner]

    def copy(self) -> OwnerClock:
        """Return an independent clock that counts on from the present amounts."""
        copied = OwnerClock()
        copied._users.amounts = self._users.amounts.copy()
        copied._owners.amounts = self._owners.amounts.copy()
        copied._last_users = self._last_users
        return copied


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

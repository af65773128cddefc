"""Dormant sessions by owner and id, and the bounds past which they are deleted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...scheduler.owner import Owner
from ..admission.kept_bytes import KeptBytes
from ..admission.label_shares import OwnerCounts
from .session import Session

DAY_S = 86_400.0


@dataclass(frozen=True)
class DormantLimits:
    """The bounds of all dormant sessions together, and of the age of one."""

    sessions_max: int = 1000
    seconds_max: float = 7 * DAY_S
    bytes_max: int = 256 << 20


class Excess(NamedTuple):
    """A session to delete, because of its age or else of another bound."""

    session: Session
    by_age: bool


class DormantSessions:
    """All dormant sessions. Owned by the manager; iteration starts with the longest dormant one. A
    user's dormant sessions may have the bytes that *kept_bytes* leaves for them.

    Open sessions that have yielded their place count in the bounds on bytes and numbers, too.
    """

    def __init__(self, limits: DormantLimits, kept_bytes: KeptBytes) -> None:
        self.limits = limits
        self._kept_bytes = kept_bytes
        self._bytes = OwnerCounts()
        self._by_id: OrderedDict[tuple[Owner, str], Session] = OrderedDict()
        """The dormant ones."""
        self._sizes: OrderedDict[Session, int] = OrderedDict()
        """Bytes of dormant and yielded sessions when they were added; later the size may differ."""

    @property
    def bytes(self) -> int:
        """The memory of all dormant and yielded sessions."""
        return self._bytes.total()

    @property
    def yielded(self) -> int:
        """The number of open sessions without a place."""
        return len(self._sizes) - len(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def find_session(self, owner: Owner, session_id: str) -> Session | None:
        """Return an owner's dormant session with this id."""
        return self._by_id.get((owner, session_id))

    def bytes_of(self, user: int) -> int:
        """Return the memory of a user's dormant and yielded sessions."""
        return self._bytes.of_user(user)

    def fits(self, size: int) -> bool:
        """Return whether a session of this size can be kept at all."""
        limits = self.limits
        return limits.sessions_max > 0 and limits.seconds_max > 0 and size <= limits.bytes_max

    def add_session(self, session: Session) -> None:
        """Add a session that has become dormant."""
        assert session.session_id is not None, "only a session with an id can be found again"
        self._by_id[session.owner, session.session_id] = session
        self.add_yielded(session)

    def add_yielded(self, session: Session) -> None:
        """Add an open session that has yielded its place."""
        self._sizes[session] = session.kept_bytes
        self._bytes.add(session.owner, self._sizes[session])

    def remove_session(self, session: Session) -> None:
        """Remove a session, if it is there."""
        if session not in self._sizes:
            return
        owner, session_id = session.owner, session.session_id
        if session_id is not None and self._by_id.get((owner, session_id)) is session:
            del self._by_id[owner, session_id]
        self._bytes.add(owner, -self._sizes.pop(session))

    def take_excess(self, now: float) -> Excess | None:
        """Remove and return the session to delete, if there is one. It is the longest dormant one
        of a user over their own bound or else, if all users together exceed a bound, of the user
        who has most; of that user's labels, the one with most bytes loses it. If no bound is
        exceeded, it is the longest dormant session of all, if that is too old.
        """
        user = self._user_in_excess()
        if user is not None:
            owner = self._largest_owner(user)
            excess = Excess(next(s for s in self._sizes if s.owner == owner), by_age=False)
        elif self.expires_in_s(now) <= 0:
            excess = Excess(next(iter(self._by_id.values())), by_age=True)
        else:
            return None
        self.remove_session(excess.session)
        return excess

    def _largest_owner(self, user: int) -> Owner:
        """Return the owner with most bytes among a user's labels."""
        owners = {session.owner for session in self._sizes if session.owner.user == user}
        return max(sorted(owners), key=self._bytes.of)

    def _user_in_excess(self) -> int | None:
        """Return the user who loses a session, if a bound on bytes or numbers is exceeded."""
        by_user = self._bytes.users()
        for user, size in by_user.items():
            if size > self._kept_bytes.left_for_dormant(user):
                return user
        amounts = by_user if self.bytes > self.limits.bytes_max else None
        if len(self._sizes) > self.limits.sessions_max:
            amounts = Counter(session.owner.user for session in self._sizes)
        return None if amounts is None else max(amounts, key=amounts.__getitem__)

    def expires_in_s(self, now: float) -> float:
        """Return the seconds until the longest dormant session is too old, or infinity."""
        for oldest in self._by_id.values():
            return oldest.used_at + self.limits.seconds_max - now
        return float("inf")

"""Dormant sessions by owner and id, and the bounds past which they are deleted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

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


class DormantSessions:
    """Owned by the manager; iteration starts with the longest dormant session. A user's dormant
    sessions may have the bytes that *kept_bytes* leaves for them.
    """

    def __init__(self, limits: DormantLimits, kept_bytes: KeptBytes) -> None:
        self.limits = limits
        self._kept_bytes = kept_bytes
        self._bytes = OwnerCounts()
        self._sessions: OrderedDict[tuple[Owner, str], Session] = OrderedDict()
        self._sizes: dict[Session, int] = {}
        """Bytes of the packed histories: an active session no longer has one."""

    @property
    def bytes(self) -> int:
        """The memory of all dormant sessions."""
        return self._bytes.total()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find_session(self, owner: Owner, session_id: str) -> Session | None:
        """Return an owner's dormant session with this id."""
        return self._sessions.get((owner, session_id))

    def add_session(self, session: Session) -> None:
        """Add a session that has become dormant."""
        assert session.session_id is not None, "only a session with an id can be found again"
        self._sessions[session.owner, session.session_id] = session
        self._sizes[session] = session.kept_bytes
        self._bytes.add(session.owner, self._sizes[session])

    def remove_session(self, session: Session) -> None:
        """Remove a session."""
        assert session.session_id is not None
        del self._sessions[session.owner, session.session_id]
        self._bytes.add(session.owner, -self._sizes.pop(session))

    def take_excess(self, now: float) -> Session | None:
        """Remove and return a session, if a bound is exceeded: the longest dormant one of the user
        who exceeds a bound or, if all users do together, of the user who has most; of that user's
        labels it is the one that has most.
        """
        user = self._user_in_excess()
        if user is None and self.expires_in_s(now) > 0:
            return None
        owner = None if user is None else self._largest_owner(user)
        excess = next(s for s in self._sessions.values() if owner in (None, s.owner))
        self.remove_session(excess)
        return excess

    def _largest_owner(self, user: int) -> Owner:
        """Return the owner with most bytes among a user's labels."""
        owners = {owner for owner, _ in self._sessions if owner.user == user}
        return max(sorted(owners), key=self._bytes.of)

    def _user_in_excess(self) -> int | None:
        """Return the user who loses a session, if a bound on bytes or numbers is exceeded."""
        by_user = self._bytes.users()
        for user, size in by_user.items():
            if size > self._kept_bytes.left_for_dormant(user):
                return user
        amounts = by_user if self.bytes > self.limits.bytes_max else None
        if len(self) > self.limits.sessions_max:
            amounts = Counter(owner.user for owner, _ in self._sessions)
        return None if amounts is None else max(amounts, key=amounts.__getitem__)

    def expires_in_s(self, now: float) -> float:
        """Return the seconds until the longest dormant session is too old, or infinity."""
        for oldest in self._sessions.values():
            return oldest.used_at + self.limits.seconds_max - now
        return float("inf")

"""Dormant sessions by owner and id, and the bounds past which they are deleted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from .session import Session

DAY_S = 86_400.0


@dataclass(frozen=True)
class DormantLimits:
    """The bounds of all dormant sessions together, and of the age of one."""

    sessions_max: int = 1000
    seconds_max: float = 7 * DAY_S
    bytes_max: int = 256 << 20


class DormantSessions:
    """Owned by the manager; iteration starts with the longest dormant session."""

    def __init__(self, limits: DormantLimits) -> None:
        self.limits = limits
        self.bytes = 0
        self._sessions: OrderedDict[tuple[int, str], Session] = OrderedDict()
        self._sizes: dict[Session, int] = {}
        """Bytes of the packed histories: an active session no longer has one."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def find_session(self, owner: int, session_id: str) -> Session | None:
        """Return an owner's dormant session with this id."""
        return self._sessions.get((owner, session_id))

    def add_session(self, session: Session) -> None:
        """Add a session that has become dormant."""
        assert session.session_id is not None, "only a session with an id can be found again"
        self._sessions[session.owner, session.session_id] = session
        self._sizes[session] = len(session.packed)
        self.bytes += self._sizes[session]

    def remove_session(self, session: Session) -> None:
        """Remove a session."""
        assert session.session_id is not None
        del self._sessions[session.owner, session.session_id]
        self.bytes -= self._sizes.pop(session)

    def take_excess(self, now: float) -> Session | None:
        """Remove and return the longest dormant session, if a bound is exceeded."""
        oldest = next(iter(self._sessions.values()), None)
        too_many = len(self) > self.limits.sessions_max or self.bytes > self.limits.bytes_max
        if oldest is None or not (too_many or self.expires_in_s(now) <= 0):
            return None
        self.remove_session(oldest)
        return oldest

    def expires_in_s(self, now: float) -> float:
        """Return the seconds until the longest dormant session is too old, or infinity."""
        for oldest in self._sessions.values():
            return oldest.used_at + self.limits.seconds_max - now
        return float("inf")

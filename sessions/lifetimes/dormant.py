"""Dormant sessions by owner and id, and the bounds past which they are deleted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ...scheduler.owner import Owner
from ..admission.bounds import KeptBytes, OwnerCounts
from ..conversation.session import Session

DAY_S = 86_400.0


@dataclass(frozen=True)
class DormantLimits:
    """The bounds of all dormant sessions together, and of the age of one."""

    sessions_max: int = 1000
    seconds_max: float = 7 * DAY_S
    bytes_max: int = 256 << 20


class ExcessReason(StrEnum):
    """The reason for which a dormant session is deleted."""

    AGE = "age"
    """It was not used for too long."""
    SESSIONS = "sessions"
    """There are too many dormant sessions."""
    MEMORY = "memory"
    """The sessions of its user, or of all users, take too much memory."""
    DELETED = "deleted"
    """Its owner has deleted it, and has not restored it in time."""


class Excess(NamedTuple):
    """A session to delete, and the reason."""

    session: Session
    reason: ExcessReason


class DormantSessions:
    """All dormant sessions. Owned by the manager; iteration starts with the longest dormant one. A
    user's dormant sessions may have the bytes that *kept_bytes* leaves for them.

    Open sessions that have yielded their place count in the bounds on bytes and numbers, too. Kept
    sessions count in the bytes of their user's open ones instead, and are never in excess. Sessions
    that were deleted and can be restored count, but only `find_deleted` finds them.
    """

    def __init__(self, limits: DormantLimits, kept_bytes: KeptBytes) -> None:
        self.limits = limits
        self._kept_bytes = kept_bytes
        self._bytes = OwnerCounts()
        self._by_id: OrderedDict[tuple[Owner, str], Session] = OrderedDict()
        """The dormant ones, except deleted ones."""
        self._deleted: OrderedDict[tuple[Owner, str], Session] = OrderedDict()
        self._sizes: OrderedDict[Session, int] = OrderedDict()
        """Bytes of dormant and yielded sessions when they were added; later the size may differ."""
        self._kept: dict[Session, None] = {}
        """Those that are kept, which are not in `_sizes`."""

    @property
    def bytes(self) -> int:
        """The memory of all dormant and yielded sessions, except kept ones."""
        return self._bytes.total()

    @property
    def yielded(self) -> int:
        """The number of open sessions without a place."""
        return len(self._sizes) + len(self._kept) - len(self._by_id) - len(self._deleted)

    @property
    def bounded(self) -> int:
        """The number of sessions that the bound on numbers counts."""
        return len(self._sizes)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def find_session(self, owner: Owner, session_id: str) -> Session | None:
        return self._by_id.get((owner, session_id))

    def find_deleted(self, owner: Owner, session_id: str) -> Session | None:
        """Return an owner's session with this id that was deleted and can be restored."""
        return self._deleted.get((owner, session_id))

    @property
    def deleted(self) -> Iterator[Session]:
        """The sessions that were deleted and can be restored."""
        return iter(list(self._deleted.values()))

    def bytes_of(self, user: int) -> int:
        """Return the memory of a user's dormant and yielded sessions, except kept ones."""
        return self._bytes.of_user(user)

    def fits(self, size: int) -> bool:
        """Return whether a session of this size can be kept at all."""
        limits = self.limits
        return limits.sessions_max > 0 and limits.seconds_max > 0 and size <= limits.bytes_max

    def add_session(self, session: Session) -> None:
        assert session.session_id is not None, "only a session with an id can be found again"
        sessions = self._deleted if session.settings.undo_s else self._by_id
        sessions[session.owner, session.session_id] = session
        self.add_yielded(session)

    def add_yielded(self, session: Session) -> None:
        """Add an open session that has yielded its place."""
        if session.settings.kept and not session.settings.undo_s:
            self._kept[session] = None
            self._kept_bytes.add_holder(session, session.owner, session.kept_bytes)
        else:
            self._sizes[session] = session.kept_bytes
            self._bytes.add(session.owner, self._sizes[session])

    def remove_session(self, session: Session) -> None:
        key = session.owner, session.session_id or ""
        for sessions in (self._by_id, self._deleted):
            if sessions.get(key) is session:
                del sessions[key]
        if session in self._kept:
            del self._kept[session]
            self._kept_bytes.remove_holder(session)
        if session in self._sizes:
            self._bytes.add(session.owner, -self._sizes.pop(session))

    def take_excess(self, now: float) -> Excess | None:
        """Remove and return the session to delete, if there is one: first one that can no longer be
        restored. Otherwise it is the longest dormant one of a user over their own bound or else, if
        all users together exceed a bound, of the user who has most; of that user's labels, the one
        with most bytes loses it, a deleted session first. If no bound is exceeded, it is the
        longest dormant session of all, if that is too old.
        """
        if not self._sizes:  # as in most daemons: this is called whenever a session has grown
            return None
        excess = self._restorable_until(now) or self._past_bounds() or self._too_old(now)
        if excess is not None:
            self.remove_session(excess.session)
        return excess

    def _restorable_until(self, now: float) -> Excess | None:
        ended = (s for s in self._deleted.values() if s.used_at + s.settings.undo_s <= now)
        found = next(ended, None)
        return None if found is None else Excess(found, ExcessReason.DELETED)

    def _past_bounds(self) -> Excess | None:
        found = self._user_in_excess()
        if found is None:
            return None
        user, reason = found
        owner = self._largest_owner(user)
        own = [session for session in self._sizes if session.owner == owner]
        deleted = next((session for session in own if session.settings.undo_s), None)
        return Excess(own[0], reason) if deleted is None else Excess(deleted, ExcessReason.DELETED)

    def _too_old(self, now: float) -> Excess | None:
        oldest = self._oldest()
        if oldest is None or oldest.used_at + self.limits.seconds_max > now:
            return None
        return Excess(oldest, ExcessReason.AGE)

    def _oldest(self) -> Session | None:
        """Return the longest dormant session that is not kept."""
        return next((s for s in self._by_id.values() if s not in self._kept), None)

    def _largest_owner(self, user: int) -> Owner:
        """Return the owner with most bytes among a user's labels."""
        owners = {session.owner for session in self._sizes if session.owner.user == user}
        return max(sorted(owners), key=self._bytes.of)

    def _user_in_excess(self) -> tuple[int, ExcessReason] | None:
        """Return the user who loses a session, if a bound on bytes or numbers is exceeded."""
        by_user = self._bytes.users()
        for user, size in by_user.items():
            if size > self._kept_bytes.left_for_dormant(user):
                return user, ExcessReason.MEMORY
        if len(self._sizes) > self.limits.sessions_max:
            counts = Counter(session.owner.user for session in self._sizes)
            return max(counts, key=counts.__getitem__), ExcessReason.SESSIONS
        if self.bytes > self.limits.bytes_max:
            return max(by_user, key=by_user.__getitem__), ExcessReason.MEMORY
        return None

    def expires_in_s(self, now: float) -> float:
        """Return the seconds until a session is too old, or can no longer be restored; infinity
        without one.
        """
        ends = [s.used_at + s.settings.undo_s for s in self._deleted.values()]
        if (oldest := self._oldest()) is not None:
            ends.append(oldest.used_at + self.limits.seconds_max)
        return min(ends, default=float("inf")) - now

    def expiry_of(self, session: Session, now: float) -> float | None:
        """Return the seconds until a dormant session is too old; None of an open or kept one."""
        if session in self._kept or not self._holds(session):
            return None
        return max(0.0, session.used_at + self.limits.seconds_max - now)

    def _holds(self, session: Session) -> bool:
        return self._by_id.get((session.owner, session.session_id or "")) is session

"""Sessions in memory, and their bounds: live ones by handle and connection, and dormant ones by
owner and id, which are deleted past the bounds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ...backends.errors import Busy, InvalidArgument, QuotaExceeded, SessionExpired
from ...backends.recent_dict import RecentDict
from ...scheduler.owner import Owner
from ..admission.bounds import Bound, KeptBytes, OwnerCounts, exceeds_share
from ..admission.ledger import Ledger
from ..conversation.session import Session
from ..table import SessionState

EXPIRED_REMEMBERED_MAX = 10_000
EXPIRED_HINT = "open a new context: only the history of a session with an id is kept"


class LiveSessions:
    """The open sessions. Owned by the manager. A connection is any hashable object."""

    def __init__(self, ledger: Ledger, sessions_max: int, idle_timeout_s: float):
        self.sessions_max = sessions_max
        self.idle_timeout_s = idle_timeout_s
        self.refused = 0
        """Sessions that a bound has refused."""
        self._ledger = ledger
        self._sessions: dict[int, tuple[object, Session]] = {}
        self.places = OwnerCounts()
        """Sessions with a place, which count in the bounds."""
        self._yielded: set[Session] = set()
        self._expired = RecentDict[int, tuple[object, str, str]](EXPIRED_REMEMBERED_MAX)
        """The connections of expired handles, with reason and hint for their clients."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter([session for _, session in self._sessions.values()])

    def __contains__(self, session: Session) -> bool:
        return session.handle in self._sessions

    def with_place(self) -> list[Session]:
        return [session for session in self if session not in self._yielded]

    def without_place(self) -> list[Session]:
        return list(self._yielded)

    def has_yielded(self, session: Session) -> bool:
        return session in self._yielded

    def yield_place(self, session: Session) -> None:
        self._yielded.add(session)
        self.places.add(session.owner, -1)
        self._ledger.kept_bytes.remove_holder(session)

    def restore_place(self, session: Session) -> None:
        self._yielded.remove(session)
        self.places.add(session.owner, 1)
        session.place_since = self._ledger.seconds()
        self._ledger.kept_bytes.add_holder(session, session.owner, session.kept_bytes)

    def sessions_of(self, connection: object) -> list[Session]:
        return [session for holder, session in self._sessions.values() if holder is connection]

    def get_session(self, connection: object, handle: int) -> Session:
        """Return the session behind a handle of *connection* and note its use.

        :raises SessionExpired: it was idle for too long.
        :raises InvalidArgument: the connection never had such a handle.
        """
        holder, session = self._sessions.get(handle, (None, None))
        if session is not None and holder is connection:
            session.used_at = self._ledger.seconds()
            return session
        holder, reason, hint = self._expired.get(handle, (None, "", ""))
        if holder is connection:
            raise SessionExpired(f"the session {handle} {reason}", hint=hint)
        raise InvalidArgument(
            f"there is no execution context {handle} on this connection",
            hint="handles end with finalize_execution_context and with their connection",
        )

    def find_id(self, owner: Owner, session_id: str) -> tuple[object, Session | None]:
        """Return the connection and the session of an owner by its id; both are None if there is
        no such session.
        """
        for holder, session in self._sessions.values():
            if session.owner == owner and session.session_id == session_id:
                return holder, session
        return None, None

    def add_session(self, connection: object, session: Session) -> None:
        """Add a session of *connection*, which uses it now."""
        session.used_at = session.place_since = self._ledger.seconds()
        session.request_place = None
        self._sessions[session.handle] = (connection, session)
        self.places.add(session.owner, 1)
        self._ledger.kept_bytes.add_holder(session, session.owner, session.kept_bytes)

    def remove_session(self, session: Session, *, expired: bool = False, reason: str = "") -> None:
        """Remove a session. The handle of an *expired* one is remembered for its connection, with
        the *reason* of its end, by default its idle time.
        """
        holder, _ = self._sessions.pop(session.handle)
        if session in self._yielded:
            self._yielded.remove(session)
        else:
            self.places.add(session.owner, -1)
        self._ledger.kept_bytes.remove_holder(session)
        if expired:
            hint = "" if session.state is SessionState.DORMANT else EXPIRED_HINT
            reason = reason or f"was idle for {self.idle_timeout_s:g} s"
            self._expired[session.handle] = holder, reason, hint

    def forget_connection(self, connection: object) -> None:
        """Forget the expired handles of a connection that was closed."""
        for handle in [h for h, entry in self._expired.items() if entry[0] is connection]:
            del self._expired[handle]

    # Places.

    @property
    def places_taken(self) -> int:
        return self.places.total()

    def bound_of(self, user: int) -> Bound:
        """Return the bound that a user's sessions reach first: the user's own, or that of all."""
        own, total = self._ledger.bounds.sessions_bound(user), self.sessions_max
        return own if own is not None and own.limit <= total else Bound("sessions-max", total)

    def refusal(self, owner: Owner, wanted: int, retry_after_s: float) -> Busy | QuotaExceeded:
        """Count *wanted* sessions of a user that exceed a bound, and return their error."""
        self.refused += wanted
        bound, own = self.bound_of(owner.user), self.places.of_user(owner.user)
        quota = self._ledger.bounds.sessions_bound(owner.user)
        is_over = quota is not None and own + wanted > quota.limit
        if is_over or exceeds_share(self.places, owner, wanted, bound.limit):
            part = "" if is_over else f", {self.places.of(owner)} of them as {owner.label!r}"
            return QuotaExceeded(
                f"you have {own} sessions open{part}; the limit is {bound.limit}",
                hint="close sessions that are done, or let idle ones expire",
                data={
                    "bound": bound.name,
                    "sessions": own,
                    "sessions_max": bound.limit,
                    "retry_after_s": retry_after_s,
                },
            )
        return Busy(
            f"{self.places_taken} sessions are open; the limit is {self.sessions_max}",
            hint="close sessions that are done, let idle ones expire, or raise sessions_max",
            data={
                "sessions": self.places_taken,
                "sessions_max": self.sessions_max,
                "retry_after_s": retry_after_s,
            },
        )

    def next_expiry_in_s(self, owner: Owner) -> float:
        """Return how many seconds remain until an idle session expires whose place *owner* could
        take. If all are in use, return the mean time of a turn.
        """
        own_only = self.places.of_user(owner.user) >= self.bound_of(owner.user).limit
        idle = [
            s.used_at for s in self if not s.in_use and (s.owner.user == owner.user or not own_only)
        ]
        if not idle:
            return self._ledger.turn_s
        return min(idle) + self.idle_timeout_s - self._ledger.seconds()


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

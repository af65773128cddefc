"""Live sessions by handle and connection, and the bounds on their number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from ...backends.errors import Busy, InvalidArgument, QuotaExceeded, SessionExpired
from ...scheduler.owner import Owner
from ..admission.bounds import Bound, OwnerCounts, exceeds_share
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
        self._expired: OrderedDict[int, tuple[object, str, str]] = OrderedDict()
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
            while len(self._expired) > EXPIRED_REMEMBERED_MAX:
                self._expired.popitem(last=False)

    def forget_connection(self, connection: object) -> None:
        """Forget the expired handles of a connection that was closed."""
        kept = ((h, e) for h, e in self._expired.items() if e[0] is not connection)
        self._expired = OrderedDict(kept)

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

"""All sessions: opening, branching, expiring and closing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio
import structlog

from ..backends.errors import Busy, InferdError, InvalidArgument, QuotaExceeded, SessionBusy
from ..scheduler.owner import Owner
from .admission.ledger import Ledger
from .conversation.session import Session
from .conversation.state import SessionSettings
from .elsewhere.copies import StoredCopies
from .elsewhere.moving import MovingSessions
from .entries import StoredSession
from .history.recent import RecentChats
from .identity import check_id
from .journal.journal import ChangeSender, Journal, Recording
from .lifetimes.deletion import Delete, DeletionNotes, SessionDeletion, nothing
from .lifetimes.places import PlaceBounds, PlaceQueue, PlaceWait
from .lifetimes.sessions_in_memory import (
    DAY_S,
    DormantLimits,
    DormantSessions,
    ExcessReason,
    LiveSessions,
)
from .memory import SESSION_BYTES, memory_bytes
from .named_states import NamedState
from .table import SessionCall, SessionState, step
from .turn.options import Parameters
from .worker_client import ModelSource

DELETED_HINT = "keep fewer sessions open, or read their answers, so that they need no place later"
BRANCHES_MAX = 16
"""Branches that one call makes."""

log = structlog.get_logger(logger_name="sessions")


class Opening(NamedTuple):
    """The request to open a session of *connection*, or to attach the one with an id.

    A new session begins with the history of its *origin*, if it has one, and is written to disk
    only with *persist*. *defaults* are its parameters.
    """

    connection: object
    owner: Owner
    model: ModelSource
    defaults: dict[str, Any]
    session_id: str | None = None
    persist: bool = True
    origin: NamedState | None = None


class _FoundId(NamedTuple):
    """The sessions with an id: open on a *connection*, dormant, or deleted and restorable."""

    connection: object
    live: Session | None
    dormant: Session | None
    deleted: Session | None

    @property
    def any(self) -> Session | None:
        return self.live or self.dormant or self.deleted


class SessionManager:
    """Opens, expires and closes sessions. Lives on the daemon's event loop.

    A session belongs to the connection (any hashable object) that opened it. A session with an id
    outlives the connection: it becomes dormant, and the same owner attaches it again; *journal*
    stores it. `deletion` deletes the data of ended sessions. *copier_of* returns a connection's
    copier, if its client wants copies of its sessions; *on_place_waited* gets the seconds of each
    wait for a place.
    """

    def __init__(
        self,
        ledger: Ledger,
        new_handle: Callable[[], int],
        *,
        sessions_max: int = 100,
        idle_timeout_s: float = 300.0,
        dormant_limits: DormantLimits | None = None,
        delete_files: Delete = nothing,
        journal: Journal | None = None,
        copier_of: Callable[[object], ChangeSender | None] = lambda _: None,
        on_place_waited: Callable[[float], None] = lambda _: None,
    ):
        self.ledger = ledger
        self.live = LiveSessions(ledger, sessions_max, idle_timeout_s)
        self.dormant = DormantSessions(dormant_limits or DormantLimits(), ledger.kept_bytes)
        self.deletion = SessionDeletion(
            delete_files, nothing if journal is None else journal.erase_session
        )
        self.deletions = DeletionNotes(journal)
        self.recent = RecentChats()
        self.expired = self.forked = 0
        """The numbers of sessions that were idle for too long, and of branches."""
        self.copies = StoredCopies(self.live, self.dormant, self.deletion, ledger, journal)
        self.moving = MovingSessions(
            self.live, self.dormant, self.deletion, self.copies, ledger, journal
        )
        self.places = PlaceQueue(
            *(self.live, self.dormant, ledger, self._wake, self._end_for_another_user),
            on_waited=on_place_waited,
        )
        self._copier_of = copier_of
        self._journal = journal
        self._new_handle = new_handle
        self._changed = anyio.Event()
        ledger.kept_bytes.growth_listeners.append(self.delete_excess)

    # Opening.

    def open_session(self, opening: Opening) -> tuple[Session, bool]:
        """Return a session, and whether it existed already (by its id).

        :raises Busy: the bound of all sessions is reached.
        :raises QuotaExceeded: one of the user's own bounds is reached.
        :raises SessionBusy: the id is in use on another connection.
        :raises InvalidArgument: the session with this id has another model.
        """
        found = self._find_live(opening)
        if found is not None:
            return found, True
        with self.places.taken_places(opening.owner):
            return self._open(opening)

    async def open_session_in_queue(
        self, opening: Opening, wait: PlaceWait
    ) -> tuple[Session, bool]:
        """Do the same as `open_session`, after a *wait* for a place.

        :raises Timeout: no place was free in time.
        :raises Busy: too many requests wait.
        """
        found = self._find_live(opening)
        if found is not None:
            return found, True
        async with self.places.waited_place(opening.owner, wait):
            # Another call may have opened it during the wait.
            found = self._find_live(opening)
            return self._open(opening) if found is None else (found, True)

    def _open(self, opening: Opening) -> tuple[Session, bool]:
        """Open a session or activate the dormant one, in a place that is reserved for it."""
        connection, owner, model, defaults, session_id, persist, origin = opening
        dormant = None if session_id is None else self.dormant.find_session(owner, session_id)
        if dormant is not None:
            dormant.attach(self._new_handle(), model)  # if refused, it stays dormant
            self.dormant.remove_session(dormant)
            self._publish(connection, dormant)
            return dormant, True
        self.ledger.kept_bytes.check_growth(owner, SESSION_BYTES + memory_bytes(defaults))
        settings = SessionSettings(Parameters(defaults), persist=persist)
        recent = self.recent if session_id is None else None
        session = Session(
            self._new_handle(), owner, model, self.ledger, settings, session_id, recent
        )
        if origin is not None:
            shared_kv = origin.shared_with(owner)
            session.begin_from(origin.name, origin.facts, origin.new_history(), shared_kv)
        self._open_recording(session)
        if origin is not None:
            session.recording.history_changed()
        self._publish(connection, session, changed=origin is not None)
        return session, False

    def _find_live(self, opening: Opening) -> Session | None:
        """Return the live session with the id of an *opening*, if there is one.

        :raises SessionBusy: it is open on another connection or another daemon, or is being moved
            or deleted.
        :raises InvalidArgument: it has another model, or this cannot be an id.
        """
        owner, session_id = opening.owner, opening.session_id
        if session_id is None:
            return None
        found = self._find_id(owner, session_id)
        if self.deletion.under_way(owner, session_id):
            raise SessionBusy(f"session {session_id!r} is being deleted", hint="try again soon")
        self.moving.check_free(owner, session_id)
        if found.deleted is not None:
            raise SessionBusy(
                f"session {session_id!r} was deleted, and can still be restored",
                hint="restore it; or delete it again, which is final, and then open a new one",
            )
        if found.live is not None and found.connection is not opening.connection:
            raise SessionBusy(
                f"session {session_id!r} is open on another connection",
                hint="close it there first; it is free once that connection ends",
            )
        if found.live is not None:
            found.live.check_model(opening.model)
        return found.live

    def _find_id(self, owner: Owner, session_id: str) -> _FoundId:
        """Return the sessions with an id.

        :raises InvalidArgument: this cannot be an id.
        """
        check_id(session_id)
        connection, live = self.live.find_id(owner, session_id)
        dormant = self.dormant.find_session(owner, session_id)
        deleted = self.dormant.find_deleted(owner, session_id)
        return _FoundId(connection, live, dormant, deleted)

    def _publish(self, connection: object, session: Session, *, changed: bool = False) -> None:
        """Add an open session; with *changed*, this call has changed its history."""
        self.live.add_session(connection, session)
        copier = self._copier_of(connection)
        if copier is not None:
            session.recording.begin_copies(copier, changed=changed)
        self._changed.set()

    def _open_recording(self, session: Session, *, found: bool = False) -> None:
        """Begin the recording of a session with an id, if it persists."""
        if self._journal is not None and session.session_id and session.settings.persist:
            key = session.owner, session.session_id
            session.recording = self._journal.open_recording(session, key, found=found)

    async def stop_persisting(self, session: Session) -> None:
        """Delete the stored data of a session, and store nothing from now on."""
        session.settings.persist, session.recording = False, Recording()
        await self.deletion.delete_states(session)

    def restore_sessions(
        self, found: Sequence[StoredSession], model: Callable[[StoredSession], ModelSource]
    ) -> None:
        """Add the stored sessions, least recently used first, as dormant ones. *model* returns the
        model of a session.
        """
        assert self._journal is not None, "stored sessions come from a journal"
        self.deletions.restore(self._journal.found_deletions)
        for stored in found:
            if stored.facts.transfer is not None and stored.facts.transfer.copy:
                self.copies.restore_copy(stored, model(stored))
                continue
            if stored.facts.transfer is not None:
                self.moving.restore_session(stored, model(stored))
                continue
            session = Session.from_stored(stored, model(stored), self.ledger)
            session.used_at = self.ledger.seconds() - self._journal.age_s(stored)
            self._open_recording(session, found=True)
            session.hold_contents()
            self.dormant.add_session(session)
        self.delete_excess()
        self._wake()  # `expire_idle` waits until the first of them is too old

    def fork_session(
        self, connection: object, session: Session, count: int, session_ids: Sequence[str] = ()
    ) -> list[Session]:
        """Return *count* branches of a session's present state. An error leaves none.

        :raises SessionBusy: a turn is under way, or an id is in use.
        :raises Busy: the bound of all sessions is reached.
        """
        self._check_fork(session, count, session_ids)
        with self.places.taken_places(session.owner, count):
            return self._branch(connection, session, count, session_ids)

    async def fork_session_in_queue(
        self,
        connection: object,
        session: Session,
        count: int,
        session_ids: Sequence[str] = (),
        *,
        wait: PlaceWait,
    ) -> list[Session]:
        """Do the same as `fork_session`, after a *wait* for the places.

        :raises Timeout: not all places were free in time.
        """
        self._check_fork(session, count, session_ids)
        async with self.places.waited_places(session.owner, wait, count):
            self._check_fork(session, count, session_ids)  # it may have changed meanwhile
            return self._branch(connection, session, count, session_ids)

    def _check_fork(self, session: Session, count: int, session_ids: Sequence[str]) -> None:
        if not 1 <= count <= BRANCHES_MAX:
            raise InvalidArgument(f"{count} branches; the range is 1 … {BRANCHES_MAX}")
        self._check_ids(session.owner, count, session_ids)
        step(session.state, SessionCall.FORK)

    def _branch(
        self, connection: object, session: Session, count: int, session_ids: Sequence[str]
    ) -> list[Session]:
        """Return branches, in places that are reserved for them."""
        session.check_growth(count * session.branch_bytes)
        ids: Sequence[str | None] = session_ids or [None] * count
        self.forked += count
        branches = [session.branch(self._new_handle(), session_id) for session_id in ids]
        for branch in branches:
            self._open_recording(branch)
            branch.recording.history_changed()
            self._publish(connection, branch, changed=True)
        return branches

    def _check_ids(self, owner: Owner, count: int, session_ids: Sequence[str]) -> None:
        if session_ids and not len(session_ids) == len(set(session_ids)) == count:
            raise InvalidArgument(
                f"{len(session_ids)} session ids for {count} branches",
                hint="give one for each, all different, or none",
            )
        for session_id in session_ids:
            found = self._find_id(owner, session_id)
            self.moving.check_free(owner, session_id)
            if found.any is not None or self.deletion.under_way(owner, session_id):
                raise SessionBusy(
                    f"there is a session {session_id!r} already",
                    hint="delete it, or use another id",
                )

    # Ending.

    async def close_session(self, session: Session) -> None:
        """End a session and delete its data, in memory and on disk, before this returns. KV states
        of a session without an id may stay if other sessions share them.
        """
        self._end_session(session, SessionCall.CLOSE, "the session was closed")
        if session.leaves_state:
            await self._delete_now(session)
        else:
            session.release_contents()
            await self.ledger.media.delete_unused(session.owner.user)

    async def delete_session(self, session: Session) -> None:
        """End a session and delete its data before this returns, with or without an id."""
        session.delete_recent_chats()
        self._end_session(session, SessionCall.CLOSE, "the session was deleted")
        await self._delete_now(session)

    def find_session(self, owner: Owner, session_id: str) -> Session | None:
        """Return an owner's session with an id, open or dormant.

        :raises InvalidArgument: this cannot be an id.
        """
        found = self._find_id(owner, session_id)
        return found.live or found.dormant

    async def delete_restorably(self, owner: Owner, session_id: str, undo_s: float) -> bool:
        """Delete a session that `restore_deleted` brings back for *undo_s* seconds. Return whether
        there was such a session.

        :raises SessionBusy: the session is being moved to another daemon.
        """
        live = self._find_id(owner, session_id).live
        if live is not None:
            if not live.can_be_dormant:
                await self.delete_session(live)
                return True
            self.detach_session(live)
        session = self.dormant.find_session(owner, session_id)
        if session is None:  # or it was past a bound at once
            return live is not None
        self.moving.check_free(owner, session_id)
        self._set_undo(session, undo_s)
        await session.wait_recorded()
        return True

    def _set_undo(self, session: Session, undo_s: float) -> None:
        self.dormant.remove_session(session)
        session.settings.undo_s, session.used_at = undo_s, self.ledger.seconds()
        session.recording.facts_changed()
        self.dormant.add_session(session)
        self.delete_excess()
        self._changed.set()

    async def restore_deleted(self, owner: Owner, session_id: str) -> Session | None:
        """Restore a session that was deleted; return None if there is none."""
        session = self._find_id(owner, session_id).deleted
        if session is None:
            return None
        self._set_undo(session, 0.0)
        await session.wait_recorded()
        return session

    def set_kept(self, session: Session, kept: bool) -> None:
        """Keep a session, so that it is not deleted while it is dormant, or no longer.

        :raises QuotaExceeded: its user would keep too many sessions, or too much memory.
        :raises Busy: all users together would.
        """
        self.check_kept(session, kept)
        if kept != session.settings.kept:
            with self._moved(session):
                session.settings.kept = kept
            session.recording.facts_changed()
            self.delete_excess()
            self._changed.set()

    def note_change(self, session: Session) -> None:
        """Count the size of a session whose settings were changed; the change is a use of it."""
        with self._moved(session):
            pass
        self.delete_excess()
        self._changed.set()

    def check_kept(self, session: Session, kept: bool) -> None:
        """Check that a session may be kept, if it is to be; see `set_kept`."""
        if not kept or session.settings.kept:
            return
        user, limits = session.owner.user, self.dormant.limits
        everything = (*self.live, *self.dormant, *self.dormant.deleted)
        found = [s for s in everything if s.settings.kept]
        own = sum(s.owner.user == user for s in found)
        bound = self.ledger.bounds.kept_sessions_bound(user)
        if own >= bound.limit:
            raise QuotaExceeded(
                f"you keep {own} sessions; the limit is {bound.limit}",
                hint="stop keeping one that is no longer needed, or delete it",
                data={"bound": bound.name, "sessions": own, "sessions_max": bound.limit},
            )
        size = sum(s.kept_bytes for s in found) + session.kept_bytes
        if len(found) >= limits.sessions_max or size > limits.bytes_max:
            raise Busy(
                f"all users keep {len(found)} sessions, which is as many as this machine keeps",
                hint="try again when others have been deleted, or ask the operator for a larger"
                " dormant-sessions-max or dormant-bytes-max",
                data={"bound": "dormant-sessions-max", "sessions": len(found)},
            )
        if session not in self.live:
            session.check_growth(session.kept_bytes)

    @contextmanager
    def _moved(self, session: Session) -> Iterator[None]:
        """Count a session anew after a change of its settings; a dormant one is used by that."""
        dormant = session.state is SessionState.DORMANT
        counted = dormant or self.live.has_yielded(session)
        if counted:
            self.dormant.remove_session(session)
        yield
        if dormant:
            session.used_at = self.ledger.seconds()
            self.dormant.add_session(session)
        elif counted:
            self.dormant.add_yielded(session)

    async def delete_session_by_id(self, owner: Owner, session_id: str) -> bool:
        """Delete a session by its id, live or dormant, or deleted but not for good; return whether
        there was one. Its files and rows on disk are deleted in any case.
        """
        ids = self._find_id(owner, session_id)
        if ids.live is not None:
            await self.delete_session(ids.live)
            return True
        session = ids.dormant or ids.deleted
        if session is None:
            found = self.moving.forget_session(owner, session_id)
            found |= self.copies.forget_copy(owner, session_id)
            await self.deletion.delete_stored_id(owner, session_id)
            return found
        self.dormant.remove_session(session)
        session.end(SessionCall.CLOSE, "the session was deleted")
        await self._delete_now(session)
        return True

    async def _delete_now(self, session: Session) -> None:
        try:
            await self.deletion.delete_now(session)
        except BaseException:
            self._changed.set()  # wakes `expire_idle`, whose `drain` tries once more
            raise

    def discard_session(self, session: Session) -> None:
        """End a session whose client does not know of it yet."""
        if session in self.live:
            self._end_session(session, SessionCall.CLOSE, "the session was not needed")
            self._delete_soon(session)

    def _end_session(
        self, session: Session, call: SessionCall, why: str, *, expired: bool = False
    ) -> None:
        session.end(call, why)
        session.note_recent_chat()
        self._remove_live(session, expired=expired)

    def _end_for_another_user(self, session: Session, error: InferdError) -> None:
        """End a session whose place another user gets; its turn fails with *error*."""
        session.end_turn(error)
        session.end(SessionCall.EXPIRE, error.message)
        self._remove_live(session, expired=True, reason=f"has ended: {error.message}")
        self._delete_soon(session)

    def _remove_live(self, session: Session, *, expired: bool = False, reason: str = "") -> None:
        """Remove a session from the live ones, and grant its place to the next request."""
        if self.live.has_yielded(session):
            self.dormant.remove_session(session)
        self.live.remove_session(session, expired=expired, reason=reason)
        self.places.end_waits_of(session)
        self.places.grant_places()

    def _delete_soon(self, session: Session) -> None:
        """Delete the data of an ended session without waiting for it."""
        if session.leaves_state:
            self.deletion.delete_later(session)
            self._changed.set()
        else:
            session.release_contents()

    def detach_session(self, session: Session, *, expired: bool = False) -> None:
        """Make a session dormant, or end it if it cannot become active again because it has no id
        or its graph was unloaded.
        """
        if session.can_be_dormant:
            session.recording.end_copies()  # output that was not read is not copied
            session.detach()
            session.used_at = self.ledger.seconds()
            self._remove_live(session, expired=expired)
            self.dormant.add_session(session)
            self.delete_excess()
            self._changed.set()
            return
        call = SessionCall.EXPIRE if expired else SessionCall.CLOSE
        why = "the session expired" if expired else "the session was closed"
        self._end_session(session, call, why, expired=expired)
        self._delete_soon(session)

    def close_connection(self, connection: object) -> None:
        """End the sessions of a closed connection; those with an id become dormant."""
        with self.places.one_grant():
            for session in self.live.sessions_of(connection):
                self.detach_session(session)
        self.live.forget_connection(connection)
        self.moving.end_holds(connection)

    def _wake(self) -> None:
        """Make `expire_idle` check again."""
        self._changed.set()

    def detach_all(self) -> None:
        """Make all sessions with an id dormant, at the daemon's end."""
        for session in self.live:
            if session.can_be_dormant:
                self.detach_session(session)

    def delete_excess(self) -> None:
        """Delete dormant sessions past the bounds, the longest dormant first."""
        now, ages_s = self.ledger.seconds(), []
        while (excess := self.dormant.take_excess(now)) is not None:
            oldest = excess.session
            if excess.reason is ExcessReason.AGE:
                ages_s.append(now - oldest.used_at)
            if oldest.session_id is not None and excess.reason is not ExcessReason.DELETED:
                self.deletions.add(
                    oldest.owner,
                    oldest.session_id,
                    title=oldest.title,
                    model=oldest.model.name,
                    reason=excess.reason,
                )
            why = "the session was deleted to stay within the bounds of dormant sessions"
            oldest.end_turn(QuotaExceeded(why, hint=DELETED_HINT))
            oldest.end(SessionCall.EXPIRE, why)
            if self.live.has_yielded(oldest):
                self.expired += 1
                self._remove_live(oldest, expired=True)
            self._delete_soon(oldest)
        if ages_s:
            log.info(
                "sessions.deleted_by_age",
                sessions=len(ages_s),
                days_max=round(max(ages_s) / DAY_S, 1),
                left=len(self.dormant),
            )

    def set_limits(
        self,
        *,
        sessions_max: int,
        idle_timeout_s: float,
        dormant_limits: DormantLimits,
        place_bounds: PlaceBounds,
    ) -> None:
        """Change the limits; open sessions beyond a lowered bound stay."""
        self.places.bounds = place_bounds
        self.live.sessions_max, self.live.idle_timeout_s = sessions_max, idle_timeout_s
        self.dormant.limits = dormant_limits
        self.places.grant_places()
        self._changed.set()

    async def expire_idle(self) -> None:
        """Expire idle sessions and delete the data of ended ones, until cancelled, without
        polling.
        """
        while True:
            self.delete_excess()
            await self.deletion.drain()
            await self.copies.drop_expired(self.ledger.seconds())
            now, timeout_s = self.ledger.seconds(), self.live.idle_timeout_s
            for session in [s for s in self.live if not s.in_use]:
                if session.used_at + timeout_s <= now:
                    self.expired += 1
                    self.detach_session(session, expired=True)
            self.places.end_late_turns()
            self.places.grant_places()
            # A session in use becomes idle now at the earliest, and expires a whole timeout later.
            idle_since = [now if s.in_use else s.used_at for s in self.live]
            wait_s = min(idle_since) + timeout_s - now if idle_since else float("inf")
            wait_s = min(wait_s, self.dormant.expires_in_s(now), self.places.next_yield_in_s())
            wait_s = min(wait_s, self.copies.expires_in_s(now), self.places.next_timeout_in_s())
            self._changed = anyio.Event()
            with anyio.move_on_after(0 if self.deletion.pending else wait_s):
                await self._changed.wait()

"""Notes on sessions that the daemon has deleted by itself, which their owners can read."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress

import msgspec

from ...scheduler.owner import Owner
from ..journal.entries import encode
from ..journal.journal import Journal

DELETION_NOTES_MAX = 100
"""Notes of one owner; the oldest one is dropped for a further one."""
DELETION_OWNERS_MAX = 1000
"""Owners with notes; those of the owner whose last note is the oldest are dropped for another's."""


class DeletionNote(msgspec.Struct, frozen=True, kw_only=True):
    """A session that was deleted *at* a time in seconds since 1970, for a *reason*."""

    session_id: str
    title: str
    model: str
    at: float
    reason: str


_decode = msgspec.msgpack.Decoder(list[DeletionNote]).decode


class DeletionNotes:
    """The notes of all owners, the latest last. Owned by the manager; *journal* stores them."""

    def __init__(self, journal: Journal | None):
        self._journal = journal
        self._by_owner: OrderedDict[Owner, list[DeletionNote]] = OrderedDict()
        """The owner with the latest note is last."""

    def restore(self, stored: Mapping[Owner, bytes]) -> None:
        """Take over the notes that the journal has stored."""
        found = {}
        for owner, data in stored.items():
            with suppress(msgspec.MsgspecError):
                found[owner] = _decode(data)
        for owner in sorted((o for o in found if found[o]), key=lambda o: found[o][-1].at):
            self._by_owner[owner] = found[owner]

    def add(self, owner: Owner, session_id: str, *, title: str, model: str, reason: str) -> None:
        """Add a note on a session that is being deleted now."""
        at = time.time() if self._journal is None else self._journal.date()
        note = DeletionNote(session_id=session_id, title=title, model=model, at=at, reason=reason)
        self._by_owner[owner] = [*self._by_owner.pop(owner, []), note][-DELETION_NOTES_MAX:]
        self._store(owner)
        while len(self._by_owner) > DELETION_OWNERS_MAX:
            self._store(self._by_owner.popitem(last=False)[0])

    def of(self, owner: Owner) -> list[DeletionNote]:
        """Return the notes of an owner, or of all labels of a user, the latest first."""
        found = [note for o, notes in self._by_owner.items() if owner.includes(o) for note in notes]
        return sorted(found, key=lambda note: -note.at)[:DELETION_NOTES_MAX]

    async def clear(self, owner: Owner) -> None:
        """Delete the notes of an owner, or of all labels of a user without one. The journal has
        deleted them when this returns.
        """
        for found in [each for each in self._by_owner if owner.includes(each)]:
            del self._by_owner[found]
            self._store(found)
        if self._journal is not None:
            await self._journal.wait_deletions()

    def _store(self, owner: Owner) -> None:
        if self._journal is not None:
            self._journal.store_deletions(owner, lambda: self._packed(owner))

    def _packed(self, owner: Owner) -> bytes:
        notes = self._by_owner.get(owner)
        return encode(notes) if notes else b""

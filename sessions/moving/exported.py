"""A session in the form in which it moves between daemons."""

from __future__ import annotations

import msgspec

from ...backends.errors import InvalidArgument
from ..journal.entries import SessionFacts, decode_history
from ..session.session import Session


class ExportedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as one daemon exports it and another one imports it; *past* is a `HistoryEntry`."""

    facts: SessionFacts
    past: bytes
    persist: bool = True

    @classmethod
    def of_session(cls, session: Session) -> ExportedSession:
        """Return a dormant session."""
        return cls(facts=session.facts, past=session.packed, persist=session.settings.persist)

    @classmethod
    def decode(cls, document: bytes) -> ExportedSession:
        """Return a session from its exported form.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            found = msgspec.msgpack.decode(document, type=cls)
            decode_history(found.past)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidArgument(f"the exported session cannot be read: {exc}") from None
        return found

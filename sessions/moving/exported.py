"""A session in the form in which it moves between daemons."""

from __future__ import annotations

import msgspec

from ...backends.errors import InvalidArgument
from ...scheduler.kv.file_format import KvHead
from ..journal.entries import SessionFacts, decode_history, encode
from ..session.session import Session

PREFIX_BYTES = 4


class ExportedSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as one daemon exports it and another one imports it; *past* is a `HistoryEntry`."""

    facts: SessionFacts
    past: bytes
    persist: bool = True
    kv: KvHead | None = None
    """The KV state that follows."""

    @classmethod
    def of_session(cls, session: Session) -> ExportedSession:
        """Return the exported form of a dormant session."""
        return cls(facts=session.facts, past=session.packed, persist=session.settings.persist)

    def encode(self) -> bytes:
        """Return the document after its size in 4 bytes. The KV state follows it."""
        body = encode(self)
        return len(body).to_bytes(PREFIX_BYTES, "little") + body

    @classmethod
    def decode(cls, document: bytes) -> ExportedSession:
        """Return the session of a document, which comes without its size.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            found = msgspec.msgpack.decode(document, type=cls)
            decode_history(found.past)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise InvalidArgument(f"the exported session cannot be read: {exc}") from None
        return found

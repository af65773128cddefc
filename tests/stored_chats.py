"""Many stored chats of a daemon, which are written to its journal and not made turn by turn."""

from __future__ import annotations

from inferd import Client
from inferd.sessions.entries import encode
from inferd.sessions.journal.journal_file import JournalFile, SavePast
from inferd.testing import RunningDaemon

__all__ = ("store_chats",)


def store_chats(daemon: RunningDaemon, model: str, count: int) -> None:
    """Restart a daemon with *count* chats: "question 0000 about fish" is the oldest."""
    with Client(daemon.socket) as client, client.session(model, session_id="chat_0") as session:
        session.chat("question 0000 about fish", options={"n-predict": 1})
    daemon.stop()
    file = JournalFile(daemon.directory / "state" / "sessions.db")
    [first] = file.open().sessions
    assert not first.pieces
    facts = encode(first.facts)
    copies = [
        SavePast(
            owner=first.owner,
            session_id=f"chat_{number}",
            facts=facts.replace(b"0000", b"%04d" % number),
            past=first.past,
            at=first.at - count + number,
        )
        for number in range(count)
    ]
    file.write(copies)
    file.close()
    daemon.start_again()

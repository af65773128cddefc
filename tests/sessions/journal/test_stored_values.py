"""Stored and copied values of sessions: none is left out, and those of tables 1 are read."""

from __future__ import annotations

import dataclasses
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.backends import Rendering
from inferd.daemon.models.persisted import PersistedSettings
from inferd.scheduler.priority import Priority
from inferd.sessions import Parameters, Session, SessionSettings
from inferd.sessions.history.history import History
from inferd.sessions.journal.entries import (
    HistoryEntry,
    SessionFacts,
    StoredSession,
    TurnBegin,
    TurnPiece,
    encode,
)
from inferd.sessions.journal.journal_file import SCHEMA, JournalFile
from inferd.sessions.session.conversation import Conversation
from tests.sessions.doubles import Desk


class LaterFacts(SessionFacts, frozen=True, kw_only=True):
    """Facts as a later version may have them, with other defaults."""

    fingerprint: str = "other"
    priority: str = "high"
    turns: int = 7
    tokens: int = 7


class LaterBegin(TurnBegin, frozen=True, kw_only=True):
    """The beginning of a turn as a later version may have it, with other defaults."""

    seed: int = 7
    priority: str = "high"
    special: bool = True
    turns: int = 7


class LaterKept(PersistedSettings, frozen=True, kw_only=True):
    """Runtime settings as a later version may have them, with other defaults."""

    pinned: bool = True
    keep_alive_s: float | None = 7.0


@pytest.mark.parametrize(
    ("value", "later"),
    [
        (SessionFacts(model="m"), LaterFacts),
        (TurnBegin(), LaterBegin),
        (PersistedSettings(), LaterKept),
    ],
    ids=["facts", "begin", "kept"],
)
def test_a_default_that_changes_changes_nothing_that_is_stored(
    value: msgspec.Struct, later: type[msgspec.Struct]
) -> None:
    for format_ in (msgspec.msgpack, msgspec.json):
        read = format_.decode(format_.encode(value), type=later)
        assert msgspec.structs.asdict(read) == msgspec.structs.asdict(value)


@pytest.mark.parametrize(
    "value",
    [
        SessionFacts(model="m"),
        TurnBegin(),
        HistoryEntry(),
        TurnPiece(),
        Rendering(),
        PersistedSettings(),
    ],
    ids=repr,
)
def test_all_values_are_stored(value: msgspec.Struct) -> None:
    stored = msgspec.msgpack.decode(encode(value))

    assert list(stored) == list(value.__struct_fields__)


def test_priorities_are_stored_by_name() -> None:
    assert msgspec.msgpack.decode(encode(SessionFacts(model="m")))["priority"] == "normal"
    assert msgspec.msgpack.decode(encode(TurnBegin()))["priority"] == "normal"


def first_tables(path: Path) -> None:
    """Write a journal as tables 1 have it: without defaults, with priorities as numbers."""
    file = JournalFile(path)
    file.open()
    file.close()
    pack = msgspec.msgpack.encode
    told = {"tokens": b"\1\0\0\0", "begin": {"seed": 5, "priority": 3}}
    rows = [("diary", {"model": "m", "priority": 0}, {"told": told}), ("plain", {"model": "m"}, {})]
    with sqlite3.connect(path) as db:
        for name, facts, past in rows:
            both = [(pack(each), zlib.crc32(pack(each))) for each in (facts, past)]
            values = (1000, name, 1.0, *both[0], *both[1])
            db.execute("INSERT INTO session VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        for number, piece in enumerate(({"text": b"x", "begin": {"seed": 3}}, {"end": "eos"})):
            row = (1000, "plain", number, pack(piece), zlib.crc32(pack(piece)))
            db.execute("INSERT INTO piece VALUES (?, ?, ?, ?, ?)", row)
        db.execute("PRAGMA user_version = 1")
    db.close()


def test_a_journal_of_tables_1_is_read_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    first_tables(path)
    file = JournalFile(path)

    for _ in range(2):  # as it was, and as it was rewritten
        found = file.open()
        file.close()
        assert found.set_aside is None
        diary, plain = found.sessions
        assert diary.facts == SessionFacts(model="m", priority="low")
        begin = TurnBegin(seed=5, priority="urgent")
        past = HistoryEntry(told=TurnPiece(tokens=b"\1\0\0\0", begin=begin))
        assert diary.past == encode(past)
        assert plain.facts == SessionFacts(model="m")
        assert plain.pieces == (TurnPiece(text=b"x", begin=TurnBegin(seed=3)), TurnPiece(end="eos"))
    header = path.read_bytes()
    assert int.from_bytes(header[60:64], "big") == SCHEMA, "older versions leave it alone"


def test_a_damaged_row_of_tables_1_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    first_tables(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE session SET past = x'ff' WHERE id = 'plain'")
    db.close()

    found = JournalFile(path).open()

    assert [stored.session_id for stored in found.sessions] == ["diary"]
    assert found.set_aside is not None


def test_a_session_stores_and_restores_each_of_its_facts() -> None:
    desk = Desk()
    facts = SessionFacts(
        model="echo",
        fingerprint="f",
        vocabulary=desk.port.info.vocab_hash,
        options={"temp": 0.5},
        defaults={"top-k": 3},
        priority="urgent",
        turns=4,
        tokens=2,
    )
    defaults = msgspec.structs.asdict(SessionFacts(model=""))
    assert all(value != defaults[name] for name, value in msgspec.structs.asdict(facts).items())
    past = encode(HistoryEntry(tokens=b"\1\0\0\0\2\0\0\0"))

    stored = StoredSession(1000, "diary", 1.0, facts, past)
    session = Session.from_stored(stored, desk.source, desk.ledger)

    assert session.facts == facts
    session.attach(7, desk.source)
    assert session.facts == facts


def test_a_branch_has_all_settings_of_its_origin() -> None:
    desk = Desk()
    values: dict[str, Any] = {
        "parameters": Parameters({"top-k": 3}),
        "priority": Priority.HIGH,
        "persist": False,
        "adapters": ("a1*0.5",),
        "lora": {"loud": 0.5},
    }
    assert set(values) == {field.name for field in dataclasses.fields(SessionSettings)}
    origin = Session(1, 1000, desk.source, desk.ledger, SessionSettings(**values))

    settings = origin.branch(2, None).settings

    assert settings.parameters.defaults == {"top-k": 3}
    assert settings.parameters is not values["parameters"]
    for name in set(values) - {"parameters"}:
        assert getattr(settings, name) == values[name]


def test_a_copy_of_a_conversation_has_all_its_state_and_keeps_it() -> None:
    conversation = Conversation()
    before = conversation.copy()
    assert vars(before).keys() == vars(conversation).keys()

    conversation.history_state.replace_history(History("system"))
    conversation.vocabulary.hash = "another"
    conversation.last.piece = b"more"

    assert not before.messages
    assert (before.vocabulary.hash, before.last.piece) == ("", b"")

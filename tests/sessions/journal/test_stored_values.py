"""Stored values hold when defaults change, and those of tables 1 are read."""

from __future__ import annotations

import sqlite3
import zlib
from pathlib import Path

import msgspec
import pytest

from inferd.backends import Rendering
from inferd.daemon.models.persisted import Kept
from inferd.sessions.journal.entries import HistoryEntry, SessionFacts, TurnBegin, TurnPiece, encode
from inferd.sessions.journal.journal_file import SCHEMA, JournalFile


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


class LaterKept(Kept, frozen=True, kw_only=True):
    """Runtime settings as a later version may have them, with other defaults."""

    pinned: bool = True
    keep_alive_s: float | None = 7.0


@pytest.mark.parametrize(
    ("value", "later"),
    [(SessionFacts(model="m"), LaterFacts), (TurnBegin(), LaterBegin), (Kept(), LaterKept)],
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
    [SessionFacts(model="m"), TurnBegin(), HistoryEntry(), TurnPiece(), Rendering(), Kept()],
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

"""Stored and copied values of sessions: none is left out, and unknown ones are damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from inferd.backends import Rendering
from inferd.daemon.models.persisted_settings import PersistedSettings
from inferd.scheduler.messages import SharedKv
from inferd.scheduler.owner import Owner, Priority
from inferd.sessions import Parameters, Session, SessionSettings
from inferd.sessions.conversation.state import Conversation
from inferd.sessions.entries import (
    HistoryEntry,
    SessionFacts,
    StoredSession,
    Transfer,
    TurnBegin,
    TurnPiece,
    encode,
)
from inferd.sessions.history.history import History
from inferd.sessions.journal.journal_file import JournalFile, SavePast, SavePiece
from tests.sessions.doubles import Harness


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

    assert list(stored) == list(value.__struct_encode_fields__)


def test_priorities_are_stored_by_name() -> None:
    assert msgspec.msgpack.decode(encode(SessionFacts(model="m")))["priority"] == "normal"
    assert msgspec.msgpack.decode(encode(TurnBegin()))["priority"] == "normal"


UNKNOWN = {"priority": "later"}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("facts", {"model": "m", **UNKNOWN}),
        ("past", {"unfinished": {"begin": UNKNOWN}}),
        ("data", {"begin": UNKNOWN}),
    ],
    ids=["facts", "past", "piece"],
)
def test_an_unknown_priority_name_is_damage_of_its_session_alone(
    tmp_path: Path, column: str, value: dict[str, Any]
) -> None:
    file = JournalFile(tmp_path / "sessions.db")
    file.open()
    values = {
        "facts": encode(SessionFacts(model="m")),
        "past": encode(HistoryEntry()),
        "data": encode(TurnPiece()),
    }
    for name, own in (("good", values), ("bad", {**values, column: encode(value)})):
        key: dict[str, Any] = {"owner": Owner(1000), "session_id": name}
        past = SavePast(**key, facts=own["facts"], past=own["past"], at=1.0)
        file.write([past, SavePiece(**key, number=0, data=own["data"])])
    file.close()

    found = file.open()

    assert [stored.session_id for stored in found.sessions] == ["good"]
    assert found.set_aside is not None and found.cause == "1 sessions cannot be read"


def test_a_session_stores_and_restores_each_of_its_facts() -> None:
    harness = Harness()
    facts = SessionFacts(
        model="echo",
        fingerprint="f",
        vocabulary=harness.port.info.vocab_hash,
        options={"temp": 0.5},
        defaults={"top-k": 3},
        out_of_range={"temp": "200 is outside 0 … 100: 100 is used"},
        priority="urgent",
        turns=4,
        tokens=2,
        on_behalf_of="@ada",
        note=b"mine",
        title="Diary",
        opening="Dear diary",
        kept=True,
        undo_s=60.0,
        transfer=Transfer("t", "there", departed=True),
        media=(bytes(32),),
    )
    defaults = msgspec.structs.asdict(SessionFacts(model=""))
    assert all(value != defaults[name] for name, value in msgspec.structs.asdict(facts).items())
    parts = [{"type": "text", "text": "Dear diary"}, {"type": "image", "sha256": bytes(32).hex()}]
    message = {"role": "user", "content": parts}
    past = encode(HistoryEntry(tokens=b"\1\0\0\0\2\0\0\0", messages=[message]))

    stored = StoredSession(Owner(1000), "diary", 1.0, facts, past)
    session = Session.from_stored(stored, harness.source, harness.ledger)

    assert session.facts == facts
    session.attach(7, harness.source)
    assert session.facts == facts


def test_a_branch_has_all_settings_of_its_origin() -> None:
    harness = Harness()
    values: dict[str, Any] = {
        "parameters": Parameters({"top-k": 3}),
        "priority": Priority.HIGH,
        "persist": False,
        "adapters": ("a1*0.5",),
        "lora": {"loud": 0.5},
        "shared_kv": SharedKv(1, "state:/story", 3, b"digest"),
        "on_behalf_of": "@ada",
        "key": "phone",
        "note": b"mine",
        "title": "Diary",
        "opening": "Dear diary",
        "kept": True,
        "undo_s": 0.0,
    }
    assert set(values) == {field.name for field in dataclasses.fields(SessionSettings)}
    origin = Session(1, Owner(1000), harness.source, harness.ledger, SessionSettings(**values))

    settings = origin.branch(2, None).settings

    assert settings.parameters.defaults == {"top-k": 3}
    assert settings.parameters is not values["parameters"]
    own = {"note": b"", "title": "", "opening": "", "kept": False}
    for name in set(values) - {"parameters", *own}:
        assert getattr(settings, name) == values[name]
    assert {name: getattr(settings, name) for name in own} == own
    assert (origin.settings.note, origin.settings.title) == (b"mine", "Diary")


def test_a_copy_of_a_conversation_has_all_its_state_and_keeps_it() -> None:
    conversation = Conversation()
    before = conversation.copy()
    assert vars(before).keys() == vars(conversation).keys()

    conversation.history_state.replace_history(History("system"))
    conversation.vocabulary.hash = "another"
    conversation.last.piece = b"more"

    assert not before.messages
    assert (before.vocabulary.hash, before.last.piece) == ("", b"")

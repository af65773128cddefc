"""The choice of followers, the plan of repairs, and the records of promotions, without nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferd.backends.errors import Busy, InvalidArgument
from inferd.gateways.fleet.copies import continued_sessions as promotions
from inferd.gateways.fleet.copies.continued_sessions import Promotion, Promotions
from inferd.gateways.fleet.copies.table import (
    CopyPlace,
    CopyTable,
    choose_follower,
    listed_copies,
    listed_sessions,
    missing_copies,
    newest_copies,
    stale_copies,
)
from inferd.gateways.fleet.routing.homes import FleetUser, SessionKey
from inferd.gateways.fleet.routing.loads import ModelLoad, NodeLoad

MODEL = "m"
KEY = SessionKey(FleetUser("@ada", ""), "s")


def node(*, loaded: bool = True, model: str = MODEL, **fields: Any) -> NodeLoad:
    load = ModelLoad(loaded=loaded, need_bytes=None if loaded else 10)
    return NodeLoad(instance=1, models={model: load}, **fields)


@pytest.mark.parametrize(
    ("loads", "copies", "expected"),
    [
        ({"a": node()}, {}, None),
        ({"a": node(), "b": node()}, {}, "b"),
        ({"a": node(), "b": node(draining=True)}, {}, None),
        ({"a": node(), "b": node(model="other")}, {}, None),
        ({"a": node(), "b": node(), "c": node()}, {"b": 2, "c": 1}, "c"),
        ({"a": node(), "b": node(loaded=False), "c": node()}, {"c": 9}, "c"),
        ({"a": node(), "b": node(loaded=False, free_bytes=1)}, {}, "b"),
        (
            {
                "a": node(),
                "b": node(loaded=False, free_bytes=1),
                "c": node(loaded=False, free_bytes=99),
            },
            {"c": 9},
            "c",
        ),
    ],
)
def test_a_copy_goes_to_the_node_that_can_continue_best(
    loads: dict[str, NodeLoad], copies: dict[str, int], expected: str | None
) -> None:
    assert choose_follower(MODEL, "a", loads, copies) == expected


def test_a_node_that_has_refused_is_not_chosen() -> None:
    loads = {name: node() for name in "abc"}
    assert choose_follower(MODEL, "a", loads, {}, {"b"}) == "c"
    assert choose_follower(MODEL, "a", loads, {}, {"b", "c"}) is None


def session(state: str, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": "s",
        "on_behalf_of": "@ada",
        "label": "",
        "model": MODEL,
        "state": state,
        "turns": 1,
        "tokens": 2,
        "transfer": None,
        **fields,
    }


def copy(peer: str, **fields: Any) -> dict[str, Any]:
    return session("copy", transfer={"id": f"of-{peer}", "peer": peer}, **fields)


def lists(**sessions: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: {"sessions": found} for name, found in sessions.items()}


def test_of_two_copies_the_newer_one_counts() -> None:
    listed = lists(b=[copy("a", turns=2)], c=[copy("a", turns=3)])
    [newest] = newest_copies(listed_copies(listed)).values()
    assert newest.place.follower == "c"


@pytest.mark.parametrize(
    ("listed", "all_listed", "known", "stale"),
    [
        (lists(a=[session("dormant")], b=[copy("a")]), True, "b", []),
        (lists(a=[session("dormant")], b=[copy("a")], c=[copy("a")]), True, "b", ["c"]),
        (lists(a=[], b=[copy("a")]), True, "b", ["b"]),
        (lists(b=[copy("a")]), False, "b", []),
    ],
)
def test_a_copy_is_deleted_without_its_session(
    listed: dict[str, Any], all_listed: bool, known: str, stale: list[str]
) -> None:
    places = {KEY: CopyPlace("a", known, "of-a")}
    copies, sessions = listed_copies(listed), listed_sessions(listed)
    found = stale_copies(copies, sessions, places.get, all_listed=all_listed)
    assert [one.place.follower for one in found] == stale


@pytest.mark.parametrize(
    ("state", "place", "missing"),
    [
        ("dormant", None, True),
        ("dormant", CopyPlace("a", "old", "t"), True),
        ("ready", None, False),
        ("dormant", CopyPlace("a", "b", "t"), False),
        ("dormant", CopyPlace("a", "lost", "t"), True),
        ("dormant", CopyPlace("other", "b", "t"), True),
        ("dormant", CopyPlace("a", "b", "t", is_current=False), True),
        ("arriving", None, False),
        ("departed", None, False),
    ],
)
def test_a_dormant_session_without_a_copy_gets_one(
    state: str, place: CopyPlace | None, missing: bool
) -> None:
    here = [session(state), session("dormant", session_id=None)]
    listed = lists(a=here, b=[copy("a")], old=[copy("a", turns=0)])
    sessions, copies = listed_sessions(listed), listed_copies(listed)
    found = missing_copies(
        sessions, copies, lambda _: place, lambda at: at.follower in ("b", "old")
    )
    assert [one.node for one in found] == (["a"] if missing else [])


def test_the_table_counts_copies_by_node() -> None:
    table = CopyTable()
    table.put(KEY, CopyPlace("a", "b", "t"))
    table.put(KEY, CopyPlace("a", "c", "t"))
    assert dict(+table.counts) == {"c": 1} and len(table) == 1
    table.drop(KEY)
    table.drop(KEY)
    assert not +table.counts


def record(session_id: str = "s", **fields: Any) -> Promotion:
    return Promotion(
        user="@ada", label="", session_id=session_id, home="a", follower="b", stream="t", **fields
    )


def opened(folder: Path) -> Promotions:
    found = Promotions(folder)
    found.open()
    return found


def test_records_are_there_after_a_restart_until_they_have_ended(tmp_path: Path) -> None:
    records = opened(tmp_path / "state")
    records.write(record("kept"))
    records.write(record("kept", is_kept=True))
    records.write(record("ended"))
    records.write(record("ended", has_ended=True))
    again = opened(tmp_path / "state")
    assert again.all() == [record("kept", is_kept=True)]
    assert again.find(KEY) is None


def test_a_record_counts_if_the_file_cannot_be_made_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError("no space is left")

    records = opened(tmp_path)
    records.write(record("kept"))
    size = (tmp_path / "promotions.jsonl").stat().st_size
    monkeypatch.setattr(promotions, "write_private", refuse)
    monkeypatch.setattr(promotions, "LINES_SPARE", 2)
    for _ in range(8):
        records.write(record("kept", is_kept=True))
    assert (tmp_path / "promotions.jsonl").stat().st_size > 8 * size
    monkeypatch.undo()
    monkeypatch.setattr(promotions, "LINES_SPARE", 2)
    records.write(record("kept", is_kept=True))  # the next record tries it again
    assert (tmp_path / "promotions.jsonl").stat().st_size < 2 * size
    assert opened(tmp_path).all() == [record("kept", is_kept=True)]


def test_an_incomplete_record_was_not_used(tmp_path: Path) -> None:
    opened(tmp_path).write(record("first"))
    file = tmp_path / "promotions.jsonl"
    file.write_bytes(file.read_bytes() + b'{"user": "@a')
    again = opened(tmp_path)
    assert [one.session_id for one in again.all()] == ["first"]
    again.write(record("second"))
    assert len(opened(tmp_path)) == 2
    file.write_bytes(b"no record\n")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        opened(tmp_path)


def test_the_number_of_records_and_lines_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotions, "RECORDS_MAX", 2)
    monkeypatch.setattr(promotions, "LINES_SPARE", 3)
    records = opened(tmp_path)
    for number in range(20):
        records.write(record(f"{number}"))
        records.write(record(f"{number}", has_ended=True))
    assert len((tmp_path / "promotions.jsonl").read_text().splitlines()) <= 4
    for name in ("first", "second"):
        records.write(record(name))
    with pytest.raises(Busy):
        records.write(record("third"))
    records.write(record("first", is_kept=True))

"""Chats over HTTP: titles, search, kept chats, deletions with undo and notes, settings, lists."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.durations import check_duration
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway, keyed_gateway
from tests.gateways.http.own_paths import Caller, Response
from tests.stored_chats import store_chats
from tests.waiting import wait_until

CONFIG = "[daemon]\nkept_sessions_user_max = 2\n" + echo_model("m") + echo_model("slow", step_ms=50)
QUESTION = "Why is the sky blue?"


@pytest.fixture(scope="module")
def caller(http: RunningGateway) -> Caller:
    return Caller(http)


def patch(caller: Caller, name: str, **fields: Any) -> Response:
    return caller.send("PATCH", f"/sessions/{name}", fields)


def ids(caller: Caller, query: str) -> set[str]:
    found = caller.get(f"/sessions?{query}")
    assert found.status == 200, found
    return {session["id"] for session in found.json["data"]}


def test_a_chat_has_a_title_and_the_time_of_its_deletion(caller: Caller) -> None:
    caller.post("/sessions", model="m", id="chat_1", system="Be brief.")
    assert caller.get("/sessions/chat_1").json["title"] == ""
    caller.chat("m", QUESTION, "chat_1")
    found = caller.get("/sessions/chat_1").json
    assert (found["title"], found["kept"], found["interrupted"]) == (QUESTION, False, False)
    assert abs(found["delete_at"] - time.time() - 7 * 86_400) < 600
    assert patch(caller, "chat_1", title="Sky").json["title"] == "Sky"
    assert patch(caller, "chat_1", title="").json["title"] == QUESTION
    made = caller.post("/sessions", model="m", id="chat_2", title="Named").json
    assert made["title"] == "Named"


def test_a_title_that_is_too_long_is_refused_by_name(caller: Caller) -> None:
    caller.post("/sessions", model="m", id="long")
    found = patch(caller, "long", title="x" * 201)
    assert found.status == 400 and "201 characters" in found.json["error"]["message"]
    made = caller.post("/sessions", model="m", id="longer", title="x" * 201)
    assert made.status == 400 and caller.get("/sessions/longer").status == 404
    assert patch(caller, "none", title="x").status == 404
    assert patch(caller, "long", titel="x").json["error"]["param"] == "titel"


def test_chats_are_searched_and_divided_into_pages(caller: Caller) -> None:
    for name, text in (("found_1", "deep sea"), ("found_2", "Deep space"), ("other", "deep")):
        caller.chat("m", text, name)
    assert ids(caller, "search=DEEP&prefix=found_") == {"found_1", "found_2"}
    assert ids(caller, "search=space") == {"found_2"}
    first = caller.get("/sessions?search=deep&prefix=found_&limit=1").json
    assert first["has_more"]
    [one] = first["data"]
    rest = caller.get(f"/sessions?search=deep&prefix=found_&after={one['id']}").json
    assert not rest["has_more"] and len(rest["data"]) == 1
    assert first["dormant"]["sessions_max"] == 1000 and first["dormant"]["sessions"] > 0
    assert first["dormant"]["seconds_max"] == 7 * 86_400
    assert caller.get("/sessions?search=" + "x" * 201).status == 400


def test_kept_chats_have_no_date_and_are_bounded(caller: Caller) -> None:
    for name in ("k1", "k2", "k3"):
        caller.chat("m", "hi", name)
    for name in ("k1", "k2"):
        found = patch(caller, name, kept=True).json
        assert (found["kept"], found["delete_at"]) == (True, None)
    refused = patch(caller, "k3", kept=True)
    assert refused.status == 429
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert "you keep 2 sessions" in refused.json["error"]["message"]
    assert patch(caller, "k1", kept=False).json["delete_at"] is not None
    assert patch(caller, "k2", kept=False).status == 200


def test_settings_of_a_chat_are_stored_with_it(caller: Caller) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    caller.post("/sessions", model="m", id="set", temperature=0.5, seed=7, priority="low")
    found = caller.get("/sessions/set").json
    assert (found["options"]["temp"], found["options"]["seed"]) == (0.5, 7)
    changed = patch(caller, "set", temperature=0.25, seed=None, json_schema=schema)
    assert changed.status == 200, changed
    options = caller.get("/sessions/set").json["options"]
    assert options["temp"] == 0.25 and "seed" not in options and options["json-schema"]
    assert patch(caller, "set", json_schema=None).status == 200
    assert "json-schema" not in caller.get("/sessions/set").json["options"]
    assert patch(caller, "set", temperature=500).json["error"]["param"] == "temperature"
    assert patch(caller, "set", priority="urgent").status == 403


@pytest.mark.parametrize("schema", ['{"type": "nonsense"}', "no JSON", '{"type": 7}', "[1]"])
def test_a_schema_that_is_none_is_refused_by_name_and_changes_nothing(
    caller: Caller, schema: str
) -> None:
    caller.post("/sessions", model="m", id="schema")
    refused = patch(caller, "schema", json_schema=schema, title="changed")
    assert refused.status == 400, refused
    assert refused.json["error"]["param"] in ("json_schema", "json-schema")
    assert caller.get("/sessions/schema").json["options"] == {}
    assert caller.get("/sessions/schema").json["title"] == ""
    made = caller.post("/sessions", model="m", id="unmade", json_schema=schema)
    assert made.status == 400 and caller.get("/sessions/unmade").status == 404


def test_the_priority_of_a_chat_is_that_of_its_turns(caller: Caller, client: Client) -> None:
    caller.post("/sessions", model="slow", id="polite", priority="low")
    body: dict[str, Any] = {"model": "slow", "session_id": "polite", "stream": True}
    body |= {"messages": [{"role": "user", "content": "x" * 200}]}
    with caller.opened("POST", "/v1/chat/completions", body) as response:
        assert response.status == 200
        [task] = [t for t in client.queue() if t["session_id"] == "polite"]
        assert task["priority"] == "low"
    wait_until(lambda: caller.post("/sessions/polite/rewind", messages=0).status == 200)
    assert caller.get("/sessions/polite").json["priority"] == "low"


def test_a_deleted_chat_is_restored(caller: Caller) -> None:
    caller.chat("m", "hi", "undone")
    found = caller.delete("/sessions/undone?undo=60").json
    assert found == {"id": "undone", "object": "session", "deleted": True, "restorable_s": 60}
    assert caller.get("/sessions/undone").status == 404
    assert "undone" not in ids(caller, "")
    assert caller.delete("/sessions/undone").status == 404
    assert caller.post("/sessions/undone/restore").json["title"] == "hi"
    assert caller.post("/sessions/undone/restore").status == 404
    assert caller.delete("/sessions/undone?undo=3601").status == 400
    assert caller.delete("/sessions/undone").json["deleted"]
    assert caller.post("/sessions/undone/restore").status == 404


def test_chats_that_vanish_leave_notes_for_their_owner(tmp_path: Path) -> None:
    config = "[daemon]\ndormant_sessions_max = 1\n" + echo_model("m")
    with (
        running_daemon(config) as daemon,
        keyed_gateway(daemon, tmp_path, ["ada", "bob"]) as (running, keys),
    ):
        ada, bob = Caller(running, keys["ada"]), Caller(running, keys["bob"])
        ada.chat("m", QUESTION, "chat_1")
        ada.chat("m", "two", "chat_2")
        [note] = ada.get("/deletions").json["data"]
        assert abs(note.pop("deleted_at") - time.time()) < 60
        assert note == {
            "object": "session.deletion",
            "id": "chat_1",
            "title": QUESTION,
            "model": "m",
            "reason": "sessions",
        }
        assert bob.get("/deletions").json["data"] == []
        assert bob.delete("/deletions").status == 200
        assert len(ada.get("/deletions").json["data"]) == 1
        assert ada.delete("/deletions").json["deleted"]
        assert ada.get("/deletions").json["data"] == []


def test_another_callers_chats_are_neither_changed_nor_restored(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    with keyed_gateway(daemon, tmp_path, ["ada", "bob"]) as (running, keys):
        ada, bob = Caller(running, keys["ada"]), Caller(running, keys["bob"])
        ada.chat("m", "secret words", "mine")
        assert ids(bob, "search=secret") == set()
        assert patch(bob, "mine", title="x", kept=True).status == 404
        assert bob.delete("/sessions/mine?undo=60").status == 404
        assert ada.delete("/sessions/mine?undo=60").status == 200
        assert bob.post("/sessions/mine/restore").status == 404
        assert ada.post("/sessions/mine/restore").status == 200


def test_a_thousand_chats_are_listed_within_the_bound() -> None:
    """The page lists all chats whenever one changes."""
    with running_daemon(echo_model("m")) as daemon:
        store_chats(daemon, "m", 1000)
        with gateway(daemon) as running:
            caller = Caller(running)

            def list_chats(query: str, count: int) -> None:
                assert len(caller.get(f"/sessions?{query}").json["data"]) == count

            check_duration(0.3, partial(list_chats, "limit=1000", 1000))
            check_duration(0.3, partial(list_chats, "limit=1000&search=question", 1000))
            check_duration(0.3, partial(list_chats, "limit=100", 100))

"""Sessions over HTTP: created, listed, read, branched, rewound, stopped, deleted."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inferd import Client
from inferd.gateways.http.inferd_api.sessions import boundaries_of, turns_after
from inferd.ipc.client import HistoryResult
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway
from tests.gateways.http.own_paths import Caller
from tests.waiting import wait_until

CONFIG = echo_model("echo") + echo_model("slow", step_ms=50, slots=1)


@pytest.fixture(scope="module")
def caller(http: RunningGateway) -> Caller:
    return Caller(http)


def texts(caller: Caller, session_id: str) -> list[str]:
    found = caller.get(f"/sessions/{session_id}")
    assert found.status == 200, found
    return [message["content"] for message in found.json["messages"]]


def code_of(response: Any) -> tuple[int, Any, Any]:
    """Return the status, the code and the field of an error."""
    error = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return response.status, error["code"], error["param"]


def test_a_created_session_has_its_system_prompt_and_is_dormant(caller: Caller) -> None:
    made = caller.post("/sessions", model="echo", id="made", system="Be brief.", priority="low")
    assert made.status == 200
    shown = made.json
    assert {name: shown[name] for name in ("object", "id", "model", "state", "priority")} == {
        "object": "session",
        "id": "made",
        "model": "echo",
        "state": "dormant",
        "priority": "low",
    }
    assert shown["turns"] == 0 and shown["position"] is None
    read = caller.get("/sessions/made").json
    assert read["messages"] == [{"role": "system", "content": "Be brief."}]
    assert read["boundaries"] == [1]
    assert caller.chat("echo", "hi", "made") == "hi"
    assert texts(caller, "made") == ["Be brief.", "hi", "hi"]


def test_a_session_without_an_id_gets_one(caller: Caller) -> None:
    one, two = (caller.post("/sessions", model="echo").json["id"] for _ in range(2))
    assert one != two and one.startswith("session_")
    assert caller.get(f"/sessions/{one}").json["messages"] == []


def test_an_id_in_use_is_409_and_changes_nothing(caller: Caller) -> None:
    caller.post("/sessions", model="echo", id="twice", system="first")
    again = caller.post("/sessions", model="slow", id="twice", system="second")
    assert code_of(again) == (409, "session_busy", "id")
    assert texts(caller, "twice") == ["first"]


def test_parameters_of_a_session_hold_for_its_turns(caller: Caller) -> None:
    caller.post("/sessions", model="echo", id="short", n_predict=3)
    assert caller.chat("echo", "abcdef", "short") == "abc"
    assert caller.chat("echo", "abcdef", "short", max_tokens=5) == "abcde"


def test_a_refused_session_leaves_nothing(caller: Caller, client: Client) -> None:
    wrong = caller.post("/sessions", model="echo", id="wrong", temperature="hot")
    assert code_of(wrong) == (400, "invalid_argument", "temperature")
    assert code_of(caller.get("/sessions/wrong")) == (404, "not_found", "session_id")
    assert client.sessions(dormant=True, session_id="wrong") == []
    unknown = caller.post("/sessions", model="nothing", id="wrong")
    assert code_of(unknown) == (404, "model_not_found", "model")
    high = caller.post("/sessions", model="echo", id="wrong", priority="high")
    assert code_of(high) == (403, "permission_denied", "priority")
    for fields in ({"id": ""}, {"id": "x" * 129}, {"system": 1}, {"model": None}):
        assert caller.post("/sessions", **{"model": "echo", **fields}).status == 400


def test_sessions_are_listed_the_latest_used_first_in_pages(caller: Caller) -> None:
    for name in ("p1", "p2", "p3"):
        caller.post("/sessions", model="echo", id=name)
    caller.chat("echo", "x", "p2")
    first = caller.get("/sessions?limit=2").json
    assert [each["id"] for each in first["data"]] == ["p2", "p3"] and first["has_more"]
    second = caller.get("/sessions?limit=1&after=p3").json
    assert [each["id"] for each in second["data"]] == ["p1"]
    for query in ("limit=0", "limit=1001", "limit=x", "colour=red", "&".join("abcdefghijklmnopq")):
        assert caller.get(f"/sessions?{query}").status == 400
    assert code_of(caller.get("/sessions?after=nothing")) == (404, "not_found", "after")


def test_requests_without_a_session_are_not_listed(caller: Caller, http: RunningGateway) -> None:
    before = {each["id"] for each in caller.get("/sessions?limit=1000").json["data"]}
    caller.chat("echo", "x")
    assert {each["id"] for each in caller.get("/sessions?limit=1000").json["data"]} == before


def test_a_branch_begins_at_a_message_and_leaves_the_original(caller: Caller) -> None:
    caller.post("/sessions", model="echo", id="trunk", system="s")
    for text in ("one", "two"):
        caller.chat("echo", text, "trunk")
    whole = ["s", "one", "one", "two", "two"]
    assert caller.get("/sessions/trunk").json["boundaries"] == [1, 3, 5]
    assert caller.post("/sessions/trunk/fork", id="b5").json["id"] == "b5"
    assert caller.post("/sessions/trunk/fork", id="b3", messages=3).status == 200
    unnamed = caller.post("/sessions/trunk/fork", messages=1).json["id"]
    caller.chat("echo", "three", "b3")
    assert texts(caller, "b5") == texts(caller, "trunk") == whole
    assert texts(caller, "b3") == [*whole[:3], "three", "three"]
    assert texts(caller, unnamed) == ["s"]
    assert code_of(caller.post("/sessions/trunk/fork", id="b5"))[:2] == (409, "session_busy")
    inside = caller.post("/sessions/trunk/fork", id="b2", messages=2)
    assert code_of(inside) == (400, "invalid_argument", "messages")
    assert "1, 3, 5" in inside.json["error"]["message"]
    assert caller.get("/sessions/b2").status == 404


def test_edit_and_resend_is_a_rewind_and_a_chat(caller: Caller) -> None:
    caller.post("/sessions", model="echo", id="edited", system="s")
    for text in ("one", "two", "three"):
        caller.chat("echo", text, "edited")
    rewound = caller.post("/sessions/edited/rewind", messages=3)
    assert rewound.status == 200 and rewound.json["state"] == "dormant"
    assert caller.chat("echo", "other", "edited") == "other"
    assert texts(caller, "edited") == ["s", "one", "one", "other", "other"]
    assert caller.post("/sessions/edited/rewind", turns=2).status == 200
    assert texts(caller, "edited") == ["s"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": 0, "turns": 1}, "messages"),
        ({"messages": 2}, "messages"),
        ({"messages": 99}, "messages"),
        ({"messages": -1}, "messages"),
        ({"turns": 2}, "turns"),
        ({"turns": 0}, "turns"),
        ({"tokens": 1}, "tokens"),
    ],
)
def test_a_rewind_to_nowhere_is_refused(caller: Caller, fields: Any, param: str) -> None:
    if caller.get("/sessions/still").status == 404:
        caller.post("/sessions", model="echo", id="still", system="s")
        caller.chat("echo", "one", "still")
    assert code_of(caller.post("/sessions/still/rewind", **fields)) == (
        400,
        "invalid_argument",
        param,
    )
    assert texts(caller, "still") == ["s", "one", "one"]


def message(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def begin_turn(caller: Caller, client: Client, session_id: str, pool: ThreadPoolExecutor) -> Any:
    """Begin a streamed turn of some minutes, and return its lines when it has ended."""

    def read() -> list[str]:
        body: dict[str, Any] = {"model": "slow", "messages": message("x" * 3000)}
        body |= {"session_id": session_id, "stream": True}
        with caller.opened("POST", "/v1/chat/completions", body) as response:
            return [line.decode() for line in response if line.startswith(b"data")]

    reading = pool.submit(read)
    wait_until(lambda: [task for task in client.queue() if task["output_tokens"] > 1])
    return reading


def test_a_turn_is_cancelled_by_another_request_and_keeps_its_answer(
    caller: Caller, client: Client
) -> None:
    caller.post("/sessions", model="slow", id="stopped", system="s")
    with ThreadPoolExecutor(1) as pool:
        reading = begin_turn(caller, client, "stopped", pool)
        running = caller.get("/sessions/stopped").json
        assert running["state"] == "running" and running["position"] == 0
        assert 0 < len(running["messages"][-1]["content"]) < 3000
        for path, fields in (("rewind", {"turns": 1}), ("fork", {})):
            busy = caller.post(f"/sessions/stopped/{path}", **fields)
            assert code_of(busy)[:2] == (409, "session_busy")
        done = caller.post("/sessions/stopped/cancel")
        assert done.json == {"object": "session", "id": "stopped", "cancelled": True}
        rewound = caller.post("/sessions/stopped/rewind", messages=3)
        assert rewound.status == 200, "the session is free once the reply is sent"
        error = json.loads(reading.result()[-1].removeprefix("data: "))["error"]
    assert error["code"] == "cancelled"
    assert len(texts(caller, "stopped")) == 3
    assert caller.post("/sessions/stopped/cancel").json["cancelled"] is False
    assert caller.post("/sessions/nothing/cancel").status == 404


def test_a_turn_of_another_program_of_the_user_is_cancelled(
    caller: Caller, client: Client, daemon: RunningDaemon
) -> None:
    with (
        client.session("slow", session_id="elsewhere") as session,
        session.stream("x" * 3000) as stream,
    ):
        next(stream)
        assert caller.post("/sessions/elsewhere/cancel").json["cancelled"] is True
        wait_until(lambda: not client.queue())


def test_a_client_that_disconnects_leaves_the_session_with_its_answer_so_far(
    caller: Caller, client: Client
) -> None:
    body: dict[str, Any] = {"model": "slow", "messages": message("x" * 3000)}
    body |= {"session_id": "left", "stream": True}
    with caller.opened("POST", "/v1/chat/completions", body) as response:
        while not response.readline().startswith(b"data: "):
            pass
        wait_until(lambda: [task for task in client.queue() if task["output_tokens"] > 1])
    caller.post("/sessions/left/cancel")
    wait_until(lambda: caller.get("/sessions/left").json["state"] == "dormant")
    question, answer = texts(caller, "left")
    assert len(question) == 3000 and 0 < len(answer) < 3000
    assert caller.post("/sessions/left/rewind", messages=0).status == 200
    assert texts(caller, "left") == []


def test_a_deleted_session_does_not_exist_any_more(caller: Caller, client: Client) -> None:
    caller.post("/sessions", model="echo", id="a/b c")
    reply = caller.delete("/sessions/a/b%20c")
    assert reply.json == {"id": "a/b c", "object": "session", "deleted": True}
    for response in (
        caller.delete("/sessions/a/b%20c"),
        caller.get("/sessions/a/b%20c"),
        caller.post("/sessions/a/b%20c/fork"),
        caller.post("/sessions/a/b%20c/rewind", turns=1),
    ):
        assert code_of(response) == (404, "not_found", "session_id")
    assert client.sessions(dormant=True, session_id="a/b c") == []


def test_the_boundaries_of_a_history() -> None:
    history = HistoryResult(messages=[{}] * 5, turns=[1, 3], session={})
    assert boundaries_of(history) == [1, 3, 5]
    assert [turns_after(history, kept) for kept in (5, 3, 1)] == [0, 1, 2]
    assert boundaries_of(HistoryResult(messages=[], turns=[0, 0], session={})) == [0]

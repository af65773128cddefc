"""The rest of a session's turn over HTTP: after disconnects, kills and restarts, for any reader."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inferd import Client
from inferd.gateways.http.limits import RESTART_S_MAX
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import RunningGateway, gateway, keyed_gateway
from tests.gateways.http.own_paths import PATH, Caller
from tests.waiting import wait_until

CONFIG = "[daemon]\nshutdown_grace_s = 0.1\n" + echo_model("m", step_ms=10, slots=2)
STORY = "Once upon a time — «über» the hills — there was a king who had three sons. " * 2


class Event(NamedTuple):
    """An event of a stream: its id or None, and its data."""

    id: str | None
    data: Any


class Turn:
    """Reads the events of a turn, and keeps the text and the last id."""

    def __init__(self, response: HTTPResponse):
        self.response = response
        self.text, self.last_id, self.reason = "", "", None
        self.error: Any = None
        self.events: list[Event] = []

    def read(self) -> bool:
        """Read the next event; return whether there was one."""
        found_id = None
        while line := self.response.readline().decode():
            if line.startswith("id: "):
                found_id = line[4:].strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]\n":
                return False
            data = json.loads(line[6:])
            self.events.append(Event(found_id, data))
            self.last_id = found_id or self.last_id
            self.error = data.get("error")
            for choice in data.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
                self.reason = choice["finish_reason"] or self.reason
            return True
        return False

    def read_text(self, size: int) -> Turn:
        """Read until the text has this number of characters."""
        while len(self.text) < size:
            assert self.read(), (self.text, self.error)
        return self

    def read_all(self) -> Turn:
        """Read to the end."""
        while self.read():
            pass
        return self


@contextmanager
def asked(caller: Caller, session_id: str, text: str = STORY, **fields: Any) -> Iterator[Turn]:
    """Yield the events of a new turn of a session."""
    body = {
        "model": "m",
        "session_id": session_id,
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        **fields,
    }
    with caller.opened("POST", "/v1/chat/completions", body) as response:
        assert response.status == 200, response.read()
        yield Turn(response)


@contextmanager
def rest(caller: Caller, session_id: str, after: str = "") -> Iterator[Turn]:
    """Yield the events of the rest of a turn."""
    path = f"{PATH}/sessions/{session_id}/events"
    with Caller(caller.running, **caller.headers, Last_Event_ID=after).opened(
        "GET", path
    ) as response:
        assert response.status == 200, response.read()
        yield Turn(response)


def refused(caller: Caller, session_id: str, after: str) -> tuple[int, Any, Any]:
    """Return status, code and field of the refusal to read a turn after an event."""
    found = caller.get(f"/sessions/{session_id}/events?after={after}")
    return found.status, found.json["error"]["code"], found.json["error"]["param"]


@pytest.fixture(scope="module")
def caller(http: RunningGateway) -> Caller:
    return Caller(http)


def is_dormant(caller: Caller, session_id: str) -> bool:
    return bool(caller.get(f"/sessions/{session_id}").json["state"] == "dormant")


def test_each_event_of_a_turn_has_an_id_and_the_end_marks_the_last(caller: Caller) -> None:
    with asked(caller, "ids", stream_options={"include_usage": True}) as turn:
        turn.read_all()
    assert turn.text == STORY and turn.reason == "stop"
    *chunks, usage = turn.events
    assert usage.id is None and usage.data["usage"]["completion_tokens"] > 0
    ids = [event.id for event in chunks]
    assert None not in ids and len(set(ids)) == len(ids)
    assert [each for each in ids if each and each.endswith(".end")] == ids[-1:]


def test_turns_without_a_session_have_no_ids(caller: Caller) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with caller.opened("POST", "/v1/chat/completions", body) as response:
        assert all(event.id is None for event in Turn(response).read_all().events)


@pytest.mark.parametrize("size", [0, 1, 70, len(STORY)])
def test_a_client_that_disconnected_gets_exactly_the_rest(caller: Caller, size: int) -> None:
    name = f"left-{size}"
    with asked(caller, name) as turn:
        turn.read_text(size)
        if not size:
            turn.read()
    wait_until(lambda: is_dormant(caller, name))
    with rest(caller, name, turn.last_id) as more:
        more.read_all()
    assert turn.text + more.text == STORY
    assert more.reason == "stop" and more.last_id.endswith(".end")
    assert more.events[-1].data["usage"]["completion_tokens"] > 0
    assert not caller.get(f"/sessions/{name}").json["interrupted"]
    with rest(caller, name) as again:
        assert again.read_all().text == STORY, "an ended turn is read from its start"
    assert caller.chat("m", "next", name) == "next"


def test_an_interrupted_turn_is_marked_until_it_continues(caller: Caller) -> None:
    with asked(caller, "marked") as turn:
        turn.read_text(20)
    wait_until(lambda: caller.get("/sessions/marked").json["interrupted"])
    with rest(caller, "marked", turn.last_id) as more:
        more.read_all()
    assert turn.text + more.text == STORY
    found = caller.get("/sessions/marked").json
    assert (found["interrupted"], found["turns"]) == (False, 1), "it is still the same turn"


def test_after_the_end_there_is_nothing_to_read(caller: Caller) -> None:
    with asked(caller, "whole", "hi") as turn:
        turn.read_all()
    path = f"{PATH}/sessions/whole/events?after={turn.last_id}"
    with caller.opened("GET", path) as response:
        assert (response.status, response.read()) == (204, b"")


def test_two_readers_at_once_read_one_turn_at_their_own_places(
    caller: Caller, client: Client
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(asked(caller, "shared"))
        first.read_text(30)
        second = stack.enter_context(rest(caller, "shared"))
        third = stack.enter_context(rest(caller, "shared", first.last_id))
        second.read_text(10)
        assert len([task for task in client.queue() if task["session_id"] == "shared"]) == 1
        with ThreadPoolExecutor() as threads:
            turns = list(threads.map(Turn.read_all, (first, second, third)))
    assert [turn.reason for turn in turns] == ["stop"] * 3
    assert first.text == second.text == STORY
    assert STORY.endswith(third.text) and len(third.text) <= len(STORY) - 30
    [session] = client.sessions(dormant=True, session_id="shared")
    assert session["turns"] == 1


def test_the_second_reader_carries_the_turn_on_when_the_first_disconnects(caller: Caller) -> None:
    with ExitStack() as stack:
        with asked(caller, "carried") as first:
            first.read_text(20)
            second = stack.enter_context(rest(caller, "carried", first.last_id))
            third = stack.enter_context(rest(caller, "carried"))
            second.read_text(10)
            third.read_text(10)
        assert first.text + second.read_all().text == STORY
        assert third.read_all().text == STORY


def test_a_turn_that_is_cancelled_ends_for_all_readers_and_can_be_continued(
    caller: Caller,
) -> None:
    with asked(caller, "stopped") as first, rest(caller, "stopped") as second:
        first.read_text(10)
        second.read_text(10)
        assert caller.post("/sessions/stopped/cancel").json["cancelled"]
        assert first.read_all().error["code"] == second.read_all().error["code"] == "cancelled"
    with rest(caller, "stopped", first.last_id) as more:
        assert first.text + more.read_all().text == STORY


def test_a_reader_that_reads_nothing_stops_neither_the_others_nor_memory(caller: Caller) -> None:
    with asked(caller, "slow", STORY * 4) as first, rest(caller, "slow"):
        assert first.read_all().text == STORY * 4


@pytest.mark.parametrize(
    "after", ["x", "1.2.3", "1.0.00000000.0.00000000.0.end.", "-1.0.00000000.0.00000000.0", "٣" * 5]
)
def test_garbage_instead_of_an_id_is_refused_by_name(caller: Caller, after: str) -> None:
    assert caller.chat("m", "hi", "garbage") == "hi"
    if after.isascii():
        assert refused(caller, "garbage", after) == (400, "invalid_argument", "last-event-id")
    headers = {"Last_Event_ID": after if after.isascii() else "%D9%A3"}
    found = Caller(caller.running, **headers).get("/sessions/garbage/events")
    assert found.status == 400


def test_an_id_of_another_turn_or_another_answer_is_refused(caller: Caller) -> None:
    with asked(caller, "two", "first") as one:
        one.read_text(3)
        one.read_all()
    before = one.events[2].id
    assert before
    with asked(caller, "two", "second") as two:
        two.read_all()
    assert refused(caller, "two", before) == (400, "invalid_argument", "last-event-id")
    turn, *others = before.split(".")
    forged = ".".join([str(int(turn) + 1), *others])
    assert refused(caller, "two", forged) == (400, "invalid_argument", "last-event-id")
    long = f"{int(turn) + 1}.900.00000000.0.00000000.0"
    assert refused(caller, "two", long) == (400, "invalid_argument", "last-event-id")


def test_a_session_without_a_turn_has_nothing_to_read(caller: Caller) -> None:
    assert refused(caller, "none", "")[:2] == (404, "not_found")
    caller.post("/sessions", model="m", id="empty")
    assert refused(caller, "empty", "")[:2] == (404, "not_found")
    assert caller.chat("m", "one", "empty") == "one"
    assert caller.post("/sessions/empty/rewind", turns=1).status == 200
    assert refused(caller, "empty", "")[:2] == (404, "not_found"), "its last turn was removed"


def test_a_session_that_another_program_uses_is_busy(caller: Caller, client: Client) -> None:
    with client.session("m", session_id="elsewhere") as session:
        session.chat("hi")
        assert refused(caller, "elsewhere", "")[:2] == (409, "session_busy")


def test_another_caller_finds_no_turn(daemon: RunningDaemon, tmp_path: Path) -> None:
    with keyed_gateway(daemon, tmp_path, ["ada", "bob"]) as (running, keys):
        ada, bob = Caller(running, keys["ada"]), Caller(running, keys["bob"])
        with asked(ada, "private") as turn:
            turn.read_text(10)
            assert refused(bob, "private", "")[:2] == (404, "not_found")
            assert refused(bob, "private", turn.last_id)[:2] == (404, "not_found")
            assert turn.read_all().text == STORY
        assert refused(bob, "private", turn.last_id)[:2] == (404, "not_found")
        assert bob.get("/sessions").json["data"] == []


def test_a_hundred_readers_at_once_get_the_whole_answer(daemon: RunningDaemon) -> None:
    with gateway(daemon) as running, ThreadPoolExecutor(100) as threads:
        caller = Caller(running)

        def read(_: int) -> str:
            with rest(caller, "crowd") as turn:
                return turn.read_all().text

        with asked(caller, "crowd") as first:
            first.read_text(5)
            found = list(threads.map(read, range(100)))
            assert first.read_all().text == STORY
    assert set(found) == {STORY}


def test_a_turn_continues_after_the_gateway_was_killed(daemon: RunningDaemon) -> None:
    with gateway(daemon) as running, asked(Caller(running), "survivor") as turn:
        turn.read_text(40)
        running.process.kill()
        turn.read_all()
    with gateway(daemon) as running:
        caller = Caller(running)
        wait_until(lambda: caller.get("/sessions/survivor").json["interrupted"])
        with rest(caller, "survivor", turn.last_id) as more:
            assert turn.text + more.read_all().text == STORY


def test_a_cut_turn_is_reported_at_once_and_continues_with_the_next_daemon() -> None:
    with running_daemon(CONFIG) as daemon, gateway(daemon) as running:
        caller = Caller(running)
        with asked(caller, "cut") as turn, rest(caller, "cut") as other:
            turn.read_text(40)
            other.read_text(40)
            daemon.kill()
            killed_at = time.monotonic()
            turn.read_all()
            other.read_all()
            seconds = time.monotonic() - killed_at
        assert turn.error["code"] == other.error["code"] == "connection_lost"
        assert "resume" not in turn.error["message"] + other.error["message"]
        assert seconds < RESTART_S_MAX / 2, "the daemon's end is not waited out"
        restart = threading.Timer(0.2, daemon.start_again)
        restart.start()
        with rest(caller, "cut", turn.last_id) as more:
            assert turn.text + more.read_all().text == STORY
        restart.join()
        with rest(caller, "cut", other.last_id) as more:
            assert other.text + more.read_all().text == STORY


def test_a_turn_continues_after_daemon_and_gateway_were_killed() -> None:
    """The daemon may have stored less of the answer than was sent: the last 50 ms."""
    with running_daemon(CONFIG) as daemon:
        with gateway(daemon) as running, asked(Caller(running), "both") as turn:
            turn.read_text(60)
            daemon.kill()
            running.process.kill()
            turn.read_all()
        daemon.start_again()
        with gateway(daemon) as running, rest(Caller(running), "both", turn.last_id) as more:
            assert turn.text + more.read_all().text == STORY
            assert more.reason == "stop"

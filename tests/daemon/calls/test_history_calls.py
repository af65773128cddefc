"""The messages of sessions, open and dormant, as `history` returns them."""

from __future__ import annotations

from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import InvalidArgument, NotFound, TooLarge
from inferd.sessions.conversation.session import NOTE_BYTES_MAX
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.waiting import wait_until

CONFIG = "".join(
    (
        echo_model("echo", slots=4),
        echo_model("slow", slots=1, step_ms=20),
        '[models.hermes]\nbackend = "echo"\necho = { tool_format = "hermes" }\n',
    )
)


def texts(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in messages]


def test_a_history_has_the_messages_of_an_open_and_of_a_dormant_session(
    client: Client, daemon: RunningDaemon
) -> None:
    with client.session("echo", session_id="diary", system="Be brief.") as session:
        session.chat("one")
        session.chat("two")
        opened = session.history()
        with Client(daemon.socket) as other:
            assert other.history(session_id="diary").messages == opened.messages
    dormant = client.history(session_id="diary")
    assert dormant.session["state"] == "dormant" and dormant.session["session_id"] == "diary"
    assert dormant.messages == opened.messages and dormant.turns == opened.turns == [1, 3]
    roles = [role for role, _ in texts(dormant.messages)]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert texts(dormant.messages)[:2] == [("system", "Be brief."), ("user", "one")]


def test_a_note_stays_with_its_session(client: Client, daemon: RunningDaemon) -> None:
    with client.session("echo", session_id="noted") as session:
        session.chat("one")
        assert session.history().note == b""
        client.set_options(session.context, note=b"\x00mine")
        client.set_options(session.context, {"temp": 0.5})
        assert session.history().note == b"\x00mine", "other calls leave it as it is"
        [branch] = client.fork_session(session.context).contexts
        client.save_state(session.context, "noted-state")
        assert client.history(branch).note == b""
        with pytest.raises(TooLarge) as caught:
            client.set_options(session.context, {"temp": 0.125}, note=b"x" * (NOTE_BYTES_MAX + 1))
        assert caught.value.data["note_bytes_max"] == NOTE_BYTES_MAX and caught.value.hint
        [temp] = [p for p in client.parameters(session.context) if p["name"] == "temp"]
        assert temp["value"] != 0.125, "a refused call changes nothing"
        assert session.history().note == b"\x00mine"
    with client.session("echo", from_state="noted-state") as session:
        assert session.history().note == b""
    with Client(daemon.socket) as other:
        assert other.history(session_id="noted").note == b"\x00mine", "it is dormant"
    with client.session("echo", session_id="noted") as session:
        session.chat("two")
        assert session.history().note == b"\x00mine"
        client.set_options(session.context, note=b"x" * NOTE_BYTES_MAX)
        assert len(session.history().note) == NOTE_BYTES_MAX
        client.set_options(session.context, note=b"")
        assert session.history().note == b""


def test_turns_are_the_numbers_of_messages_that_a_rewind_leaves(client: Client) -> None:
    with client.session("echo", system="s") as session:
        for text in ("one", "two", "three"):
            session.chat(text)
        for back in (2, 1):
            expected = session.history().turns[-back]
            session.rewind(back)
            assert len(session.history().messages) == expected
        assert session.history().turns == []


def test_a_history_has_the_answer_of_a_turn_under_way_so_far(
    client: Client, daemon: RunningDaemon
) -> None:
    with client.session("slow", session_id="long") as session:
        session.chat("x" * 3)
        with Client(daemon.socket) as other, session.stream("y" * 200) as stream:
            next(stream)

            def last() -> dict[str, Any]:
                return other.history(session_id="long").messages[-1]

            wait_until(lambda: last()["role"] == "assistant" and last()["content"])
            assert other.history(session_id="long").session["state"] == "running"
            assert 0 < len(last()["content"]) < 200
        kept = session.history().messages
    assert client.history(session_id="long").messages == kept


def test_raw_text_has_no_messages(client: Client) -> None:
    with client.session("echo", raw=True) as session:
        session.chat("raw")
        found = session.history()
    assert found.messages == [] and found.session["tokens"] > 0 and found.turns == [0]


def test_the_calls_of_an_answer_are_messages_in_openais_form(daemon: RunningDaemon) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    with Client(daemon.socket) as client, client.session("hermes") as session:
        reply = session.chat(call, options={"tools": [tool]})
        assert [each.name for each in reply.tool_calls] == ["add"]
        [*_, answer] = session.history().messages
    assert set(answer) == {"role", "content", "tool_calls"}
    assert answer["tool_calls"][0]["function"]["name"] == "add"


def test_an_unknown_session_has_no_history(client: Client) -> None:
    with pytest.raises(NotFound) as caught:
        client.history(session_id="nothing")
    assert "nothing" in caught.value.message and caught.value.hint
    for wrong in ({}, {"context": 1, "session_id": "a"}, {"session_id": ""}, {"context": 1}):
        with pytest.raises(InvalidArgument):
            client.history(**wrong)


def test_another_label_does_not_see_a_history(client: Client, daemon: RunningDaemon) -> None:
    with client.session("echo", session_id="mine") as session:
        session.chat("secret")
    with Client(daemon.socket, label="other") as other, pytest.raises(NotFound):
        other.history(session_id="mine")


def test_sessions_are_listed_by_their_id(client: Client) -> None:
    for name in ("listed-1", "listed-2"):
        with client.session("echo", session_id=name) as session:
            session.chat("x")
    [found] = client.sessions(dormant=True, session_id="listed-2")
    assert found["session_id"] == "listed-2"
    assert client.sessions(dormant=True, session_id="listed-3") == []
    assert client.sessions(session_id="listed-2") == []

"""Tool calls over a real socket: parsed, streamed, resumed, kept in the history."""

from __future__ import annotations

import json
from typing import Any

import pytest

import inferd
from inferd.backends.errors import InvalidArgument
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd as command
from tests.raw import RawClient

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
WITH_TOOLS = {"tools": TOOLS}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANSWERS = {
    "hermes": f"Sure.\n{HERMES}",
    "mistral": 'Sure.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "llama": 'Sure. <|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    "functionary": '>>>all\nSure.>>>add\n{"a": 1}',
    "function-tags": 'Sure.<function=add>{"a": 1}</function>',
}
BROKEN = '<tool_call>{"name": "add", "arguments": {"a": 1'


CONFIG = "\n".join(
    f'[models.echo-{form}]\nbackend = "echo"\necho = {{ tool_format = "{form}" }}\n'
    for form in ANSWERS
)


def shape(calls: list[inferd.ToolCall]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.values) for call in calls]


ADD = [("add", {"a": 1})]


@pytest.mark.parametrize("form", ANSWERS)
def test_a_chat_returns_its_tool_calls(client: inferd.Client, form: str) -> None:
    with client.session(f"echo-{form}", options=WITH_TOOLS) as session:
        reply = session.chat(ANSWERS[form])
        stream = session.stream(ANSWERS[form])
        text = "".join(stream)

    assert (str(reply), shape(reply.tool_calls)) == ("Sure.", ADD)
    assert (text, shape(stream.tool_calls)) == ("Sure.", ADD)
    assert stream.raw_text == ANSWERS[form]
    assert reply.metadata["tool_format"] == stream.metadata["tool_format"] == form


def test_the_parts_of_a_call_are_streamed(client: inferd.Client) -> None:
    with client.session("echo-hermes", options=WITH_TOOLS) as session:
        pieces = [p for p in session.stream(HERMES) if isinstance(p, inferd.Piece)]
    parts = [part for piece in pieces for part in piece.tool_calls]

    assert parts[0].name == "add" and len(parts[0].id) == 9 and parts[0].arguments == ""
    assert {part.index for part in parts} == {0}
    assert "".join(part.arguments for part in parts) == '{"a": 1}'
    assert len(parts) > 5, "echo has a token for each byte"


def test_a_broken_off_call_is_dropped_and_its_source_is_text(client: inferd.Client) -> None:
    with client.session("echo-hermes", options=WITH_TOOLS) as session:
        stream = session.stream(BROKEN)
        begun = [len(stream.tool_calls) for _ in stream]
        reply = session.chat(BROKEN)
    assert max(begun) == 1 and stream.tool_calls == []
    assert (str(reply), reply.tool_calls) == (BROKEN, [])
    assert stream.raw_text == BROKEN


def test_without_tools_an_answer_is_text(client: inferd.Client) -> None:
    for model, options in (("echo", WITH_TOOLS), ("echo-hermes", {})):
        reply = client.chat(model, HERMES, options=options)
        assert (str(reply), reply.tool_calls) == (HERMES, [])
        assert reply.metadata["tool_format"] == "none"
    raw = client.chat("echo-hermes", HERMES, raw=True, options=WITH_TOOLS)
    assert (str(raw), raw.metadata["tool_format"]) == (HERMES, "none")


def test_several_answers_have_their_calls(client: inferd.Client) -> None:
    with client.session("echo-hermes", options=WITH_TOOLS) as session:
        answers = session.answers(HERMES, 2)
        reply = session.chat(HERMES)
    ids = {answer.tool_calls[0].id for answer in answers}
    assert [shape(answer.tool_calls) for answer in answers] == [ADD, ADD]
    assert len(ids) == 2 and reply.tool_calls[0].id not in ids


def test_a_guest_of_wasi_nn_backend_gets_its_calls_too(client: inferd.Client) -> None:
    context = client.init_execution_context(client.load_by_name("echo-hermes"))
    reply = client.run_inference(context, HERMES, config=WITH_TOOLS)
    assert (str(reply), shape(reply.tool_calls)) == ("", ADD)


def test_reasoning_and_calls_are_separate(client: inferd.Client) -> None:
    options = WITH_TOOLS | {"reasoning-format": "deepseek"}
    answer = f"<think>hm {HERMES}</think>\n\nYes. {HERMES}"
    with client.session("echo-hermes", options=options) as session:
        stream = session.stream(answer)
        text = "".join(stream)
        reply = session.chat(answer)
    assert (text, stream.reasoning) == ("\n\nYes.", f"hm {HERMES}")
    assert (str(reply), reply.reasoning) == (text, stream.reasoning)
    assert shape(reply.tool_calls) == shape(stream.tool_calls) == ADD
    assert stream.raw_text == answer


READ = [0, 5, 6, 9, 20, 30, 40, 45, 60, 70]


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("reasoning", ["none", "deepseek"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_turn_with_calls_is_resumed_after_the_part_that_was_read(
    daemon: RunningDaemon, read: int, reasoning: str, ended: bool
) -> None:
    """The connection ends after some events; the reader resumes from them, also if the turn has
    ended.
    """
    answer = f"<think>é</think>Yes. {HERMES}"
    options = WITH_TOOLS | {"reasoning-format": reasoning, "seed": 7}
    has: dict[str, Any] = {"tokens": [], "text": b"", "reasoning": b"", "raw_text": b""}
    calls: dict[int, dict[str, str]] = {}

    def read_event(event: dict[str, Any], *, last: bool = False) -> None:
        raw = event.get("raw_text", event.get("text", b""))
        for key in ("tokens", "text", "reasoning"):
            has[key] += event.get(key, type(has[key])())
        has["raw_text"] += b"" if last else raw
        for part in event.get("tool_calls", ()):
            call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            for key in call:
                call[key] += part.get(key, "")

    def open_session(raw: RawClient) -> int:
        graph = raw.call("load_by_name", name="echo-hermes")["graph"]
        name = f"calls-{read}-{reasoning}-{ended}"
        result = raw.call("init_execution_context_with_session_id", graph=graph, session_id=name)
        return int(result["context"])

    with RawClient(daemon.socket) as raw:
        context = open_session(raw)
        credit = 500 if ended else max(1, read)
        turn = raw.start_request(
            "stream", context=context, prompt=answer, credit=credit, options=options
        )
        for _ in range(max(1, read)):
            event = raw.read_message()[2]
            if read:
                read_event(event)
        if ended:
            raw.wait_result(turn)
    with RawClient(daemon.socket) as raw:
        raw.start_request("resume", context=open_session(raw), credit=500, **has)
        while (frame := raw.read_message())[0] == 4:
            read_event(frame[2])
    assert frame[0] == 2, frame
    read_event(frame[2], last=True)

    with inferd.Client(daemon.socket) as client:
        whole = client.chat("echo-hermes", answer, options=options)
    [call] = whole.tool_calls
    assert (has["text"].decode(), has["reasoning"].decode()) == (str(whole), whole.reasoning)
    assert list(calls.values()) == [{"id": call.id, "name": "add", "arguments": '{"a": 1}'}], (
        "the same id as in an equal turn"
    )


def test_the_result_of_a_tool_follows_its_call(client: inferd.Client) -> None:
    with client.session("echo-hermes", options=WITH_TOOLS) as session:
        first = session.chat(HERMES)
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}
        second = session.chat([result])
    assert (str(second), second.tool_calls) == ("2", [])
    assert second.metadata["recomputed_tokens"] >= 0


def test_an_openai_format_of_the_answer_is_checked(client: inferd.Client) -> None:
    formats: list[dict[str, Any]] = [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    ]
    for form in formats:
        reply = client.chat("echo", "x", options={"response_format": form})
        assert "json-schema" in reply.metadata["adjusted"], "echo does not follow it"
    text = client.chat("echo", "x", options={"response_format": {"type": "text"}})
    assert text.metadata["adjusted"] == {}
    for options in (
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "text"}, "json_schema": {}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
    ):
        with pytest.raises(InvalidArgument):
            client.chat("echo", "x", options=options)


def test_the_command_shows_calls(daemon: RunningDaemon) -> None:
    words = ("run", "echo-hermes", f"Sure. {HERMES}", "-o", f"tools={json.dumps(TOOLS)}")
    plain = command(*words, socket=daemon.socket)
    assert plain.stdout == 'Sure.\nadd({"a": 1})\n'
    only = command(*(*words[:2], HERMES, *words[3:]), socket=daemon.socket)
    assert only.stdout == 'add({"a": 1})\n'
    lines = [
        json.loads(line)
        for line in command(*words, "--json", socket=daemon.socket).stdout.splitlines()
    ]
    parts = [part for line in lines for part in line.get("tool_calls", ())]
    assert parts[0]["name"] == "add"
    assert "".join(part.get("arguments", "") for part in parts) == '{"a": 1}'

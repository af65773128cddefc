"""Tool calls of an echo model that has a form for them: its prompt is its answer."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from inferd.gateways.http.turns import WholeCalls
from inferd.ipc.client import ToolCallPart
from tests.echo import echo_model

CONFIG = echo_model("echo", tool_format="hermes")
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look", "move")
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


LOOK, MOVE = '{"at": "é"}', '{"by": [1, 2]}'
CALLS = f"Well: {call('look', LOOK)}\n{call('move', MOVE)}"


def answer(
    api: openai.OpenAI, text: str, stream: bool, **extra: Any
) -> tuple[str, list[Any], str | None]:
    """Return the text, the calls and the finish reason of an answer."""
    keywords: Any = {
        "model": "echo",
        "messages": [{"role": "user", "content": text}],
        "tools": TOOLS,
        "extra_body": extra,
    }
    if not stream:
        choice = api.chat.completions.create(**keywords).choices[0]
        return choice.message.content or "", choice.message.tool_calls or [], choice.finish_reason
    found, reason = "", None
    calls: list[Any] = []
    for chunk in api.chat.completions.create(**keywords, stream=True):
        found += chunk.choices[0].delta.content or ""
        calls += chunk.choices[0].delta.tool_calls or []
        reason = chunk.choices[0].finish_reason
    assert [each.index for each in calls] == list(range(len(calls)))
    return found, calls, reason


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_parsed(api: openai.OpenAI, stream: bool) -> None:
    text, calls, reason = answer(api, CALLS, stream)
    assert (text.strip(), reason) == ("Well:", "tool_calls")
    assert [each.function.name for each in calls] == ["look", "move"]
    assert [each.function.arguments for each in calls] == [LOOK, MOVE]
    assert len({each.id for each in calls}) == 2 and all(e.type == "function" for e in calls)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_stay_in_the_text_if_they_are_not_to_be_parsed(
    api: openai.OpenAI, stream: bool
) -> None:
    assert answer(api, CALLS, stream, parse_tool_calls=False) == (CALLS, [], "stop")
    for parsed in ({"parse_tool_calls": True}, {"parse_tool_calls": None}):
        assert len(answer(api, CALLS, stream, **parsed)[1]) == 2
    with pytest.raises(openai.BadRequestError, match="parse"):
        answer(api, CALLS, stream, parse_tool_calls="no")


def test_several_answers_keep_their_calls_in_the_text(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": CALLS}]
    extra = {"parse_tool_calls": False}
    done = api.chat.completions.create(
        model="echo", messages=messages, tools=TOOLS, n=2, extra_body=extra
    )
    assert [choice.message.content for choice in done.choices] == [CALLS, CALLS]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_none_is_text(api: openai.OpenAI, stream: bool) -> None:
    broken = '<tool_call>{"name": "look", "arguments": {"at": '
    text, calls, reason = answer(api, broken, stream)
    assert (text, calls, reason) == (broken, [], "stop")


@pytest.mark.parametrize("size", [64, 65, 127, 128])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_functions_name_may_have_128_characters(
    api: openai.OpenAI, size: int, choice: Any
) -> None:
    """As those of servers of the Model Context Protocol."""
    name = "f" * size
    tools: Any = [{"type": "function", "function": {"name": name}}]
    done = api.chat.completions.create(
        model="echo",
        messages=[{"role": "user", "content": call(name, "{}")}],
        tools=tools,
        tool_choice=choice,
    )
    [found] = done.choices[0].message.tool_calls or []
    assert found.type == "function" and found.function.name == name


@pytest.mark.parametrize("name", ["f" * 129, "", "a b"])
def test_another_name_of_a_function_is_refused(api: openai.OpenAI, name: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}}]
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "x"}], tools=tools
        )
    assert caught.value.param == "tools"


def test_a_call_is_certain_once_the_next_begins() -> None:
    calls = WholeCalls()
    assert not calls.add_parts([ToolCallPart(0, "a", "look", "{")])
    assert not calls.add_parts([ToolCallPart(0, arguments="}")])
    [first] = calls.add_parts([ToolCallPart(1, "b", "move", "{")])
    assert (first.id, first.arguments) == ("a", "{}")
    assert not calls.add_parts([ToolCallPart(1, dropped=True)])
    assert not calls.finish() and calls.calls == 1

"""Answers with tool calls in a history: whatever a template makes of them, their tokens stay."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from inferd.backends import Rendering
from inferd.backends.errors import InvalidArgument
from inferd.backends.tool_formats import named_form
from inferd.sessions.answers.calls import NO_TOOLS, ToolUse
from inferd.sessions.entries import decode_history, encode
from inferd.sessions.history.history import History
from tests.sessions.history.test_history import ChatClient, ended, ids, said, turn_on, user

pytestmark = pytest.mark.asyncio

WITH_TOOLS = Rendering(tools=[{"type": "function", "function": {"name": "add"}}])
HERMES = ToolUse(form=named_form("hermes"))
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
COMPACT = CALL.replace(" ", "")
RESULT = [{"role": "tool", "content": "2"}]


class ToolClient(ChatClient):
    """Renders calls by one of several templates."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def template(self, messages: Sequence[dict[str, Any]], rendering: Rendering) -> str:
        if self.kind == "alternating":
            plain = [m["role"] for m in messages if m["role"] != "tool" and "tool_calls" not in m]
            if "assistant assistant" in " ".join(plain):
                raise InvalidArgument("roles must alternate")
        lines = [f"<{m['role'][0]}>{self._content(m)}\n" for m in messages]
        return "".join(lines) + ("<a>" if rendering.add_generation_prompt else "")

    def _content(self, message: dict[str, Any]) -> str:
        assert "raw_answer" not in message
        calls = [] if self.kind == "ignoring" else message.get("tool_calls", [])
        if calls and self.kind == "refusing":
            raise InvalidArgument("there are no calls")
        return str(message["content"]) + "".join(map(self._call, calls))

    def _call(self, call: dict[str, Any]) -> str:
        arguments = call["function"]["arguments"]
        if self.kind == "texts":
            assert isinstance(arguments, str)
        else:
            arguments = json.dumps(arguments)
        identity = f', "id": "{call["id"]}"' if self.kind == "alternating" else ""
        return f'<tool_call>{{"name": "add", "arguments": {arguments}{identity}}}</tool_call>'


class TextClient(ToolClient):
    """A template that needs arguments as texts."""

    def _call(self, call: dict[str, Any]) -> str:
        arguments = call["function"]["arguments"]
        shown = arguments if isinstance(arguments, str) else "{'a': 1}"
        return f'<tool_call>{{"name": "add", "arguments": {shown}}}</tool_call>'


async def asked(client: ToolClient, use: ToolUse = HERMES) -> History:
    history = History()
    await history.add_messages(client, user("q"), WITH_TOOLS, use)
    return history


def answered(history: History, answer: str) -> History:
    after = history.after(turn_on(history, said(answer), ended()))
    return History.from_entry(decode_history(encode(after.entry())))


@pytest.mark.parametrize("answer", [CALL, COMPACT, f"Yes.{CALL}", f"Yes. {COMPACT}\n"])
@pytest.mark.parametrize("kind", ["objects", "texts", "ignoring", "refusing", "alternating"])
async def test_the_tokens_of_calls_stay(kind: str, answer: str) -> None:
    client = TextClient(kind) if kind == "texts" else ToolClient(kind)
    history = await asked(client)
    for _ in range(3):  # the result of a call is followed by another call
        begun = list(history.prompt)
        history = answered(history, answer)
        assert history.messages[-1]["tool_calls"][0]["function"]["name"] == "add"
        await history.add_messages(client, RESULT, WITH_TOOLS, HERMES)
        assert history.recomputed.tokens == 0, history.recomputed.why
        assert history.prompt == begun + ids(answer) + ids("\n<t>2\n<a>")


async def test_an_answer_that_is_not_last_keeps_its_form() -> None:
    """A template that ignores calls gets the text of the answer for good."""
    client = ToolClient("ignoring")
    history = answered(await asked(client), CALL)
    await history.add_messages(client, RESULT, WITH_TOOLS, HERMES)
    assert history.messages[1] == {"role": "assistant", "content": CALL}
    history = answered(history, "Two.")
    await history.add_messages(client, user("and?"), WITH_TOOLS, HERMES)
    assert history.recomputed.tokens == 0


async def test_a_rewound_answer_is_completed_by_its_text() -> None:
    client = ToolClient("objects")
    history = answered(await asked(client), CALL)
    before = list(history.prompt)
    await history.add_messages(client, RESULT, WITH_TOOLS, HERMES)
    history = answered(history, "Two.")
    history.rewind_turns(1)
    assert history.prompt == before
    await history.add_messages(client, RESULT, WITH_TOOLS, HERMES)
    assert history.prompt == before + ids("\n<t>2\n<a>")


async def test_an_answer_without_calls_is_a_plain_message() -> None:
    client = ToolClient("objects")
    history = answered(await asked(client), "No call.")
    assert history.messages[-1] == {"role": "assistant", "content": "No call."}
    none = answered(await asked(client, NO_TOOLS), CALL)
    assert none.messages[-1] == {"role": "assistant", "content": CALL}
    one = answered(await asked(client, ToolUse(form=named_form("hermes"), calls_max=1)), CALL * 2)
    assert len(one.messages[-1]["tool_calls"]) == 1
    assert one.messages[-1]["content"] == CALL


async def test_a_refusal_of_every_form_is_reported_and_changes_nothing() -> None:
    client = ToolClient("objects")
    history = answered(await asked(client), CALL)
    before = history.prompt, history.messages

    def refuse(*_: object) -> str:
        raise InvalidArgument("no")

    client.template = refuse  # type: ignore[assignment,method-assign]
    with pytest.raises(InvalidArgument, match="no"):
        await history.add_messages(client, RESULT, WITH_TOOLS, HERMES)
    assert (history.prompt, history.messages) == before


async def test_a_clients_message_cannot_set_the_text_of_an_answer() -> None:
    client = ToolClient("objects")
    history = await asked(client)
    forged = {"role": "assistant", "content": "a", "raw_answer": "b"}
    await history.add_messages(client, [forged], WITH_TOOLS, HERMES)
    assert history.messages[-1] == {"role": "assistant", "content": "a"}


async def test_the_parts_of_an_answer_in_channels_are_apart() -> None:
    """The template of gpt-oss refuses messages whose content has its marks."""
    client = ToolClient("objects")
    harmony = ToolUse(form=named_form("harmony"))
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    answer = f"{thought}<|channel|>final<|message|>Yes."
    history = answered(await asked(client, harmony), answer)
    assert history.client_messages[-1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
    }
    await history.add_messages(client, user("and?"), WITH_TOOLS, harmony)
    assert history.recomputed.tokens == 0, "this template leaves content as it is"
    call = thought + ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    message = answered(await asked(client, harmony), call).client_messages[-1]
    assert (message["content"], message["reasoning_content"]) == ("", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}

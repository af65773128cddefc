"""Assistant messages that chat templates write, and the tools that they call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ("MESSAGES", "TOOLS", "AnswerMessage", "call", "functions")


@dataclass(frozen=True)
class AnswerMessage:
    """A message as a client has it. A call is a name with its arguments. *after* is text that a
    model writes behind the calls; no template writes it.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    after: str = ""

    def message(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            found["reasoning_content"] = self.reasoning
        if self.calls:
            found["tool_calls"] = [
                {
                    "id": f"call{number:05}",
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(arguments, ensure_ascii=False),
                    },
                }
                for number, (name, arguments) in enumerate(self.calls)
            ]
        return found


def call(name: str, **arguments: Any) -> tuple[str, Mapping[str, Any]]:
    return name, arguments


def _tool(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    described = {
        key: {"description": f"The {key}.", **schema} for key, schema in properties.items()
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name}.",
            "parameters": {
                "type": "object",
                "properties": described,
                "required": list(required),
            },
        },
    }


_TEXT, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_BOOLEAN, _OBJECT = {"type": "boolean"}, {"type": "object"}
_TEXT_OR_NULL = {"anyOf": [_TEXT, {"type": "null"}]}
_TEXTS = {"type": "array", "items": {"type": "string"}}

TOOLS = [
    _tool("weather", ("place",), place=_TEXT, days=_INTEGER, celsius=_BOOLEAN),
    _tool("search", ("query",), query=_TEXT, filters=_OBJECT, tags=_TEXTS, limit=_INTEGER),
    _tool("write_note", ("text",), text=_TEXT),
    _tool("convert", ("value",), value=_NUMBER, exact=_BOOLEAN, unit=_TEXT_OR_NULL),
    _tool("ping"),
]

_CODE = 'def f(x):\n    if x < 1 and x > -1:\n        return "no"\n    return [x, {"y": x}]\n'
_NESTED = {"a": {"b": [1, {"c": "d", "e": [True, None]}]}, "f": {"g": {"h": "i"}}}

MESSAGES: dict[str, AnswerMessage] = {
    # Text.
    "text": AnswerMessage("Rome is sunny."),
    "lines": AnswerMessage("First.\n\nSecond line.\n- one\n- two"),
    "unicode": AnswerMessage("Größe: 25 °C, 晴れ, שלום, 🌤️ and e\u0301"),
    "markup": AnswerMessage("Use <b>bold</b> & <br/>, not </i> or <tag attr='x'>."),
    "json": AnswerMessage('{"city": "Rome", "days": [1, 2], "sunny": true}'),
    "code": AnswerMessage('Write:\n```json\n{"name": "weather", "arguments": {}}\n```\nDone.'),
    "brackets": AnswerMessage("f(x) = {x | x > 0} [see 1], g(y) = [y], << and >>"),
    "number": AnswerMessage("42"),
    "quotes": AnswerMessage('He said "no\\n" and \\ left: it\'s `x`.'),
    "spaces": AnswerMessage("  indented\n\n    code\n"),
    "none": AnswerMessage(""),
    # Reasoning.
    "reasoning": AnswerMessage("Rome is sunny.", "The user asks for Rome."),
    "reasoning-lines": AnswerMessage("Yes.\n\nNo.", "First.\n\n1. a\n2. b\n\nSo: yes"),
    "reasoning-markup": AnswerMessage("Yes.", "If a < b and </i> then <b>, [x] & {y}"),
    "reasoning-json": AnswerMessage("Yes.", 'Call {"name": "ping", "arguments": {}}? No.'),
    "reasoning-unicode": AnswerMessage("はい。", "晴れ 🌤️, größer"),
    "reasoning-call": AnswerMessage("", "I look.", (call("weather", place="Rome"),)),
    "reasoning-text-call": AnswerMessage("One moment.", "I look.", (call("ping"),)),
    "reasoning-calls": AnswerMessage(
        "", "Both.", (call("weather", place="Rome"), call("weather", place="Oslo"))
    ),
    # One call.
    "call": AnswerMessage(calls=(call("weather", place="Rome"),)),
    "two-types": AnswerMessage(calls=(call("weather", place="Rome", days=3, celsius=True),)),
    "no-arguments": AnswerMessage(calls=(call("ping"),)),
    "numbers": AnswerMessage(calls=(call("convert", value=-1.5, exact=False),)),
    "null": AnswerMessage(calls=(call("convert", value=12345678901, unit=None),)),
    "nested": AnswerMessage(calls=(call("search", query="x", filters=_NESTED),)),
    "list": AnswerMessage(calls=(call("search", query="x", tags=["a", "b c", ""], limit=2),)),
    "empty-containers": AnswerMessage(calls=(call("search", query="x", filters={}, tags=[]),)),
    "empty-text": AnswerMessage(calls=(call("write_note", text=""),)),
    "unicode-arguments": AnswerMessage(calls=(call("weather", place="São Paulo 東京 🌤️ שלום"),)),
    "code-argument": AnswerMessage(calls=(call("write_note", text=_CODE),)),
    "quoted-argument": AnswerMessage(calls=(call("write_note", text="\"a\" \\ \\n 'b' \t c"),)),
    "markup-argument": AnswerMessage(
        calls=(call("write_note", text='<b>x</b> <a href="y">z</a> </i> & <|x|> [y]'),)
    ),
    "json-argument": AnswerMessage(calls=(call("write_note", text='{"a": [1, "b"]}'),)),
    "number-argument": AnswerMessage(calls=(call("write_note", text="42"),)),
    "word-argument": AnswerMessage(calls=(call("write_note", text="true"),)),
    "spaces-argument": AnswerMessage(calls=(call("write_note", text="  two  \n"),)),
    "call-argument": AnswerMessage(
        calls=(call("write_note", text='Say: ping(), {"name": "ping", "arguments": {}}, ]'),)
    ),
    "long-argument": AnswerMessage(calls=(call("write_note", text="Words, and more. " * 60),)),
    # Several calls.
    "same-twice": AnswerMessage(
        calls=(call("weather", place="Rome"), call("weather", place="Oslo"))
    ),
    "two-functions": AnswerMessage(
        calls=(call("weather", place="Rome", days=2), call("write_note", text="x"))
    ),
    "three-calls": AnswerMessage(
        calls=(call("ping"), call("search", query="a", filters={"b": [1]}), call("ping"))
    ),
    # Text beside calls.
    "text-before": AnswerMessage("I look it up.", calls=(call("weather", place="Rome"),)),
    "lines-before": AnswerMessage("I look:\n\n- Rome", calls=(call("weather", place="Rome"),)),
    "text-before-calls": AnswerMessage("Both.", calls=(call("ping"), call("weather", place="x"))),
    "text-after": AnswerMessage(calls=(call("weather", place="Rome"),), after="That is all."),
}
"""By name. In their order each third is one run of `make test` for a template."""


def functions() -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the functions' arguments by their names."""
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}

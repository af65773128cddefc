"""Answers with tool calls as messages of a chat, in the forms that chat templates may need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from ...backends import Rendering
from ...backends.answer_form import THINK
from .calls import ToolCall, ToolUse, call_id, join_parts, json_text, template_arguments
from .parser import AnswerParser

_RAW = "raw_answer"
"""The key of an answer's whole text, beside its parts. No template gets it."""


def new_parser(
    use: ToolUse,
    rendering: Rendering,
    rendered: str,
    context: Callable[[], bytes],
    *,
    reasoning: bool,
    finds_calls: bool,
) -> AnswerParser | None:
    """Return the parser of an answer to the prompt *rendered*, or None if all of it is text. The
    ids of the calls depend on *context*.
    """
    form, finds_calls = use.answers, finds_calls and use.allows_calls
    if not (finds_calls or reasoning or form.content or form.dropped):
        return None
    return AnswerParser(
        form,
        _schemas(rendering.tools, use.names),
        lambda index: call_id(context(), index),
        calls_max=use.calls_max,
        prompt=rendered,
        reasoning=reasoning,
        finds_calls=finds_calls,
    )


def _schemas(
    tools: Iterable[Mapping[str, Any]], names: Collection[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments of all functions, or of those with these *names*."""
    functions = [tool["function"] for tool in tools]
    return {
        f["name"]: f.get("parameters") or {} for f in functions if not names or f["name"] in names
    }


def answer_message(answer: str, parser: AnswerParser | None) -> dict[str, Any]:
    """Return the message of a whole answer, with its reasoning apart if *parser* splits it off."""
    plain = {"role": "assistant", "content": answer}
    if parser is None:
        return plain
    first, rest = parser.parse(answer), parser.finish()
    text, reasoning = first.text + rest.text, first.reasoning + rest.reasoning
    calls = join_parts([*first.parts, *rest.parts])
    if not calls and text == answer:
        return plain
    message: dict[str, Any] = plain | {"content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_message_call(call) for call in calls]
    return message | {_RAW: answer}


def _message_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def raw_answer(message: Mapping[str, Any]) -> str:
    """Return the whole text of an answer."""
    return str(message.get(_RAW, message["content"]))


def without_raw_answer(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a template or a client has it."""
    return {key: value for key, value in message.items() if key != _RAW}


def answer_forms(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the forms of a message. An answer that has parts also has the text that was generated
    as a form, the last one. One with calls has others: with their arguments as objects, which most
    templates expect, and as JSON texts. Reasoning in the text may also be apart.
    """
    forms = [message]
    if "tool_calls" in message and _RAW in message:
        forms = [_with_arguments(message, _object), _with_arguments(message, _text)]
    forms += [apart for form in forms if (apart := _reasoning_apart(form)) is not None]
    if len(forms) == 1 and _RAW not in message:
        return forms
    return [*forms, {"role": "assistant", "content": raw_answer(message)}]


def _reasoning_apart(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return an answer with the reasoning in its text apart, or None if there is none."""
    content = message.get("content", "")
    reasoning, end, text = (content if isinstance(content, str) else "").partition(THINK.end)
    if message["role"] != "assistant" or not end or "reasoning_content" in message:
        return None
    bare = reasoning.lstrip()
    reasoning = bare.removeprefix(THINK.begin) if bare.startswith(THINK.begin) else reasoning
    return message | {"content": text, "reasoning_content": reasoning}


def _with_arguments(
    message: dict[str, Any], convert: Callable[[dict[str, Any] | str], dict[str, Any] | str]
) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": convert(_arguments(call))}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def _arguments(call: Mapping[str, Any]) -> dict[str, Any] | str:
    found: dict[str, Any] | str = call["function"]["arguments"]
    return found


def _object(arguments: dict[str, Any] | str) -> dict[str, Any] | str:
    return template_arguments(arguments) if isinstance(arguments, str) else arguments


def _text(arguments: dict[str, Any] | str) -> dict[str, Any] | str:
    return arguments if isinstance(arguments, str) else json_text(arguments)

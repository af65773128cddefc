"""The form in which a chat template takes messages, found by rendering probe conversations.

Templates differ: some take the arguments of a call as an object, others as JSON text; some refuse
system messages, tool results, long ids or several calls at once. llama.cpp finds this in the same
way (`common/jinja/caps.cpp`). The functions are pure; the caller renders.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ...base import Message

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]] | None, Mapping[str, Any]], str]
"""Renders messages, tools and further names of the template."""

SHORT_ID_CHARACTERS = 9
"""The length of the ids that Mistral's templates demand; they may have letters and digits."""
_USER = {"role": "user", "content": "probe-user"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "probe-description",
        "parameters": {
            "type": "object",
            "properties": {"other": {"type": "string", "description": "probe"}},
            "required": ["other"],
        },
    },
}
_BARE_TOOL = {"type": "function", "function": {"name": "probe_tool"}}
_ARGUMENTS = {"probe_key": "probe-value", "count": 17}
_SHORT_ID, _LONG_ID = "probe0001", "call_0123456789abcdef01234567"
_RESULT = "probe-result"
_REASONING = "probe-reasoning"
_REASONS = {"enable_thinking": True, "thinking": True}
"""Arguments with which many templates write reasoning."""
_BESIDE = {"content": "probe-beside"}
_PRINTED_PART = re.compile(r"thinking['\"]\s*:")
"""A part of content that was written as data."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan", "parts")
_EMPTY_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class TemplateForm(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a template on which the form of its messages depends. The defaults are
    those of most templates.
    """

    lists_no_tools: bool = False
    """Without tools, it needs an empty list; others would write a heading for it."""
    names_functions: bool = False
    """It reads the tools as text from `functions`, and the time from `datetime` (firefunction)."""
    content_parts: bool = False
    """It reads content only as a list of parts."""
    system: bool = True
    """It writes system messages."""
    calls: Literal["object", "text", "none"] = "object"
    """The form of a call's arguments; *none*: it does not write calls."""
    null_content: bool = False
    """A message with calls and without text needs null instead of an empty text."""
    results: bool = True
    """It writes messages of the role `tool`."""
    short_ids: bool = False
    """It refuses ids of calls that do not have `SHORT_ID_CHARACTERS`."""
    single_calls: bool = False
    """It refuses several calls in one message."""
    needs_properties: bool = False
    """It reads the properties of a function's parameters even if there are none."""
    reasoning: tuple[str, ...] = ("reasoning_content",)
    """The keys from which it reads the reasoning of an answer; `parts`: a part of the content."""
    reasoning_excludes_content: bool = False
    """It refuses reasoning and content beside calls; the content is kept."""

    @property
    def notes(self) -> dict[str, str]:
        """The changes of messages that a client should know of, by role or key."""
        found = {}
        if not self.system:
            found["system"] = (
                "the chat template refuses system messages: their text precedes the first message"
                " of the user"
            )
        if self.calls == "none":
            found["tool_calls"] = "the chat template has no calls: they are written as JSON"
        if not self.results:
            found["tool"] = "the chat template has no tool results: they are messages of the user"
        return found


def derive_form(render: Render) -> TemplateForm:
    """Return the form of the template that *render* renders. It raises `ValueError` if the template
    refuses the messages; any other error ends the derivation.
    """
    return _with_reasoning(render, _message_form(render))


def _message_form(render: Render) -> TemplateForm:
    """Return the form, except for reasoning."""

    def text_of(
        form: TemplateForm,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the text of messages in a form, or an empty text if the template refuses them."""
        try:
            return render(*form_values(form, messages, tools))
        except ValueError:
            return ""

    def first(
        forms: Iterable[TemplateForm], accepts: Callable[[TemplateForm], bool]
    ) -> TemplateForm | None:
        return next(filter(accepts, forms), None)

    replace = msgspec.structs.replace
    plain = TemplateForm()
    form = first(
        (
            plain,
            replace(plain, lists_no_tools=True),
            replace(plain, content_parts=True),
            replace(plain, names_functions=True),
        ),
        lambda tried: _USER["content"] in text_of(tried, [_USER]),
    )
    if form is None:
        return plain  # it refuses every conversation, and says why
    named = replace(form, names_functions=True)
    has_tool = ["probe_tool" in text_of(f, [_USER], [_TOOL]) for f in (form, named)]
    if has_tool == [False, True]:  # a missing name is an empty text
        form = named
    system = [{"role": "system", "content": "probe-system"}, _USER]
    if "probe-system" not in text_of(form, system):
        form = replace(form, system=False)
    forms = [
        replace(form, calls=calls, null_content=null_content)
        for null_content, calls in (
            *((False, "object"), (False, "text"), (True, "text"), (True, "object")),
        )
    ]
    called = first(forms, lambda tried: _has_call(text_of(tried, _called(1), [_TOOL])))
    if called is not None:
        form = called
    elif "probe_call" not in text_of(form, _called(1), [_TOOL]):  # else it writes only their names
        form = replace(form, calls="none")
    if _RESULT not in text_of(form, _called(1), [_TOOL]):
        form = replace(form, results=False)
    if called is None:
        return form
    if not _has_call(text_of(form, _called(1, _LONG_ID), [_TOOL])):
        form = replace(form, short_ids=True)
    if text_of(form, _called(2), [_TOOL]).count("probe-value") < 2:
        form = replace(form, single_calls=True)
    if "probe_tool" not in text_of(form, [_USER], [_BARE_TOOL]):
        form = replace(form, needs_properties=True)
    return form


def _with_reasoning(render: Render, form: TemplateForm) -> TemplateForm:
    """Return the form with the keys of reasoning."""

    def writes(key: str, message: Message, more: Sequence[Message], **names: Any) -> bool:
        tried = msgspec.structs.replace(form, reasoning=(key,))
        probe = [_USER, {**message, "reasoning_content": _REASONING}, *more]
        written, tools, own = form_values(tried, probe, [_TOOL])
        try:
            text = render(written, tools, {**own, **names})
        except ValueError:
            return False
        return _REASONING in text and _PRINTED_PART.search(text) is None

    answer = {"role": "assistant", "content": "probe-answer"}
    _, call, *results = _called(1)
    last: dict[str, Any] = {"add_generation_prompt": False}
    found: list[str] = []
    probes: tuple[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]], dict[str, Any]], ...] = (
        (answer, (), last),
        (answer, (), last | _REASONS),
        (call, results, {}),
        (call, results, _REASONS),
    )
    for message, after, names in probes:
        tried = (*found, *REASONING_KEYS)
        found += [key for key in tried if writes(key, message, after, **names)][:1]
    if found:
        form = msgspec.structs.replace(form, reasoning=tuple(dict.fromkeys(found)))
    if found and form.calls != "none" and not writes(found[-1], {**call, **_BESIDE}, results):
        refused = writes(found[-1], call, results)
        form = msgspec.structs.replace(form, reasoning_excludes_content=refused)
    return form


def _called(count: int, call_id: str = _SHORT_ID) -> list[dict[str, Any]]:
    """Return a conversation with *count* calls in one message, and their results."""
    ids = [call_id[:-1] + str(n) for n in range(count)]
    calls = [
        {"id": i, "type": "function", "function": {"name": "probe_call", "arguments": _ARGUMENTS}}
        for i in ids
    ]
    results = [
        {"role": "tool", "name": "probe_call", "tool_call_id": i, "content": _RESULT} for i in ids
    ]
    return [_USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


def _has_call(text: str) -> bool:
    """Return whether the text has the arguments of a call, and not as Python writes them or as JSON
    within JSON.
    """
    wrong = "'probe_key'" in text or '\\"probe_key' in text
    return "probe-value" in text and not wrong


def form_values(
    form: TemplateForm, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, dict[str, Any]]:
    """Return the messages and tools in the template's form, and further names for it."""
    written = [_written(form, message) for message in messages]
    if form.single_calls:
        written = _one_by_one(written)
    if not form.results:
        written = _results_as_users(written)
    if not form.system:
        written = _system_before_user(written)
    if form.content_parts:
        written = [_in_parts(message) for message in written]
    declared = [_declared(form, tool) for tool in tools]
    names: dict[str, Any] = {}
    if form.names_functions:
        names["functions"] = _json(declared) if declared else ""
        # With minutes, each request would change the beginning of the prompt.
        names["datetime"] = datetime.now(UTC).strftime("%b %d %Y %H:00:00 GMT")
    return written, declared or ([] if form.lists_no_tools else None), names


def _written(form: TemplateForm, message: Message) -> dict[str, Any]:
    """Return a message without its null values, with calls and ids in the template's form."""
    kept = {key: value for key, value in message.items() if value is not None}
    calls = kept.pop("tool_calls", None)
    reasoning = kept.pop("reasoning_content", None)
    excluded = calls and kept.get("content") and form.reasoning_excludes_content
    if isinstance(reasoning, str) and reasoning and not excluded:
        kept |= _reasoning_values(form, reasoning, kept.get("content") or "")
    if calls and form.calls == "none":
        listed = "\n".join(_json(_plain_call(call)) for call in calls)
        kept["content"] = f"{kept['content']}\n{listed}" if kept.get("content") else listed
    elif calls:
        kept["tool_calls"] = [_call(form, call) for call in calls]
        if not kept.get("content"):
            kept["content"] = None if form.null_content else ""
    kept.setdefault("content", "")
    if form.short_ids and "tool_call_id" in kept:
        kept["tool_call_id"] = _short_id(str(kept["tool_call_id"]))
    return kept


def _reasoning_values(form: TemplateForm, reasoning: str, content: Any) -> dict[str, Any]:
    """Return the values of the keys from which the template reads reasoning."""
    values: dict[str, Any] = dict.fromkeys(form.reasoning, reasoning)
    if values.pop("parts", "") and isinstance(content, str):
        text = [{"type": "text", "text": content}] if content else []
        values["content"] = [{"type": "thinking", "thinking": reasoning}, *text]
    return values


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"name": function["name"], "arguments": _object(function.get("arguments", {}))}


def _call(form: TemplateForm, call: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in call.items() if value is not None}
    function = {k: v for k, v in kept["function"].items() if v is not None}
    arguments = function.get("arguments", {})
    function["arguments"] = _object(arguments) if form.calls == "object" else _text(arguments)
    kept["function"] = function
    if form.short_ids and "id" in kept:
        kept["id"] = _short_id(str(kept["id"]))
    return kept


def _object(arguments: Any) -> Any:
    """Return arguments as an object; a text that is not one, or too large for one, stays a text."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        found = msgspec.json.decode(arguments)
        msgspec.msgpack.encode(found)
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short_id(given: str) -> str:
    """Return an id of `SHORT_ID_CHARACTERS`, always the same for the same id."""
    if len(given) == SHORT_ID_CHARACTERS and given.isalnum() and given.isascii():
        return given
    return hashlib.blake2b(given.encode(), digest_size=8).hexdigest()[:SHORT_ID_CHARACTERS]


def _one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Divide messages with several calls into one for each call, each before its result."""
    found: list[dict[str, Any]] = []
    results = [m for m in messages if m["role"] == "tool"]
    moved: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if any(message is result for result in moved):
            continue
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append(message | {"tool_calls": [call]} | ({"content": ""} if number else {}))
            own = [r for r in results if "id" in call and r.get("tool_call_id") == call["id"]]
            moved += own
            found += own
    return found


def _results_as_users(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write tool results as messages of the user, and join these with those beside them."""
    found: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": message["content"]}
        if found and found[-1]["role"] == message["role"] == "user" and (is_result or joins):
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message)
        joins = is_result
    return found


def _system_before_user(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the text of system messages before that of the user's next message."""
    found: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(str(message["content"]))
        elif waiting and message["role"] == "user":
            found.append(message | {"content": "\n\n".join([*waiting, str(message["content"])])})
            waiting = []
        else:
            found.append(message)
    if waiting:
        found.append({"role": "user", "content": "\n\n".join(waiting)})
    return found


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def _declared(form: TemplateForm, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with a description and parameters, which many templates read unasked."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    function.setdefault("description", "")
    if not function.get("parameters"):
        function["parameters"] = _EMPTY_PARAMETERS if form.needs_properties else {}
    return {key: value for key, value in tool.items() if value is not None} | {"function": function}

"""The grammar of an answer that calls tools, in the form of the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...backends.errors import InvalidArgument
from ...backends.params import StructuralTag, StructuralTags, ToolChoice, structural_tag_text
from ...backends.tool_formats import ToolFormat
from .calls import json_text

AUTO, NO_CALLS, REQUIRED = "auto", "none", "required"
"""The modes of a `ToolChoice`."""
FUNCTIONARY_MARK = ">>>"
_ANY_OBJECT = {"type": "object"}
_JSON = {ToolFormat.JSON: "arguments", ToolFormat.LLAMA: "parameters"}
"""The forms in which a call is only a JSON object, and its key for the arguments."""


def constraint_of(
    form: ToolFormat,
    tools: Iterable[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    parallel: bool,
    opened: bool,
) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that make an answer call *tools* in this *form*.

    The functions are those that *choice* names, or all. If its mode is `auto`, the answer may call
    any of them, and only the arguments of functions with `strict` follow their schemas; a form
    without a mark then has no grammar, because any answer may begin like a call. If the mode is
    `required`, the answer must call one, and the arguments follow its schema. The prompt may have
    *opened* the first call by the mark before it.

    :raises InvalidArgument: no grammar can be made of the tools.
    """
    every = [tool["function"] for tool in tools]
    functions = [f for f in every if not choice.names or f["name"] in choice.names]
    required = choice.mode == REQUIRED
    if required:
        calls = {f["name"]: _schema(f) for f in functions}
    elif form not in _JSON and (choice.names or any(f.get("strict") is True for f in functions)):
        calls = {f["name"]: _schema(f) if f.get("strict") else _ANY_OBJECT for f in functions}
    else:
        return {}
    if form in _JSON:
        return {"json_schema": _json_schema(calls, _JSON[form])}
    opened = opened and form is ToolFormat.FUNCTIONARY
    tags = [_tag(form, *call, opened=opened and required) for call in calls.items()]
    single = required and (not parallel or opened)
    mark = FUNCTIONARY_MARK if opened and not required else ""
    return {"structural_tag": _tags_text(tags, required=required, single=single, opened=mark)}


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**_ANY_OBJECT, **(function.get("parameters") or {})}


def _json_schema(calls: Mapping[str, Mapping[str, Any]], key: str) -> str:
    places = [f"/anyOf/{index}" if len(calls) > 1 else "" for index in range(len(calls))]
    alternatives = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                key: _moved(schema, f"{place}/properties/{key}"),
            },
            "required": ["name", key],
            "additionalProperties": False,
        }
        for place, (name, schema) in zip(places, calls.items(), strict=True)
    ]
    schema = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
    return msgspec.json.encode(schema).decode()


def _moved(schema: Any, place: str) -> Any:
    """Return *schema* with its references adapted to its *place* in another document."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(part, place) for key, part in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = f"#{place}{reference[1:]}"
    return moved


def _tag(form: ToolFormat, name: str, schema: dict[str, Any], *, opened: bool) -> StructuralTag:
    call = f'{{"name": {json_text(name)}, "arguments": '
    match form:
        case ToolFormat.HERMES:
            trigger, begin, end = "<tool_call>", f"<tool_call>\n{call}", "}\n</tool_call>"
        case ToolFormat.MISTRAL:
            trigger, begin, end = "[TOOL_CALLS]", f"[TOOL_CALLS][{call}", "}]"
        case ToolFormat.MISTRAL_ARGS:
            trigger, begin, end = "[TOOL_CALLS]", f"[TOOL_CALLS]{name}[ARGS]", ""
        case ToolFormat.FUNCTIONARY:
            begin = f"{name}\n" if opened else f"{FUNCTIONARY_MARK}{name}\n"
            trigger, end = begin, ""
        case _:
            begin, end = f"<function={name}>", "</function>"
            trigger = "<function="
    return StructuralTag(begin=begin, end=end, trigger=trigger, schema=schema)


def _tags_text(tags: Sequence[StructuralTag], *, required: bool, single: bool, opened: str) -> str:
    try:
        return structural_tag_text(
            StructuralTags(
                tags=tuple(tags), at_least_one=required, stop_after_first=single, opened=opened
            )
        )
    except ValueError as exc:
        raise InvalidArgument(
            f"tools: no grammar can be made of them: {exc}",
            hint="use fewer functions, or shorter names and schemas",
        ) from None

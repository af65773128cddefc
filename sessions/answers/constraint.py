"""The grammar of an answer that calls tools, in the form of the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ...backends.answer_form import AnswerForm, CallForm
from ...backends.errors import InvalidArgument
from ...backends.params import StructuralTag, StructuralTags, ToolChoice, structural_tag_text
from .calls import json_text

AUTO, NO_CALLS, REQUIRED = "auto", "none", "required"
"""The modes of a `ToolChoice`."""
_ANY_OBJECT = {"type": "object"}


def constraint_of(
    form: AnswerForm,
    tools: Iterable[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    parallel: bool,
    opened: str,
) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that make an answer call *tools* in this *form*.

    The functions are those that *choice* names, or all. If its mode is `auto`, the answer may call
    any of them, and only the arguments of functions with `strict` follow their schemas; a form
    without a mark then has no grammar, because any answer may begin like a call. If the mode is
    `required`, the answer must call one, and the arguments follow its schema. *opened* is the
    mark of the answer with which the prompt ends.

    :raises InvalidArgument: no grammar can be made of the tools.
    """
    every = [tool["function"] for tool in tools]
    functions = [f for f in every if not choice.names or f["name"] in choice.names]
    required, call = choice.mode == REQUIRED, form.calls[0]
    is_object = call.whole and call.layout == "json"
    if required:
        calls = {f["name"]: _schema(f) for f in functions}
    elif not is_object and (choice.names or any(f.get("strict") is True for f in functions)):
        calls = {f["name"]: _schema(f) if f.get("strict") else _ANY_OBJECT for f in functions}
    else:
        return {}
    if is_object:
        return {"json_schema": _json_schema(calls, call.arguments_key)}
    tags = [_tag(form, call, *function) for function in calls.items()]
    opened = opened if all(tag.begin.startswith(opened) for tag in tags) else ""
    if opened and required:
        tags = [_without_mark(tag, opened) for tag in tags]
    single = required and (not parallel or opened != "")
    mark = "" if required else opened
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


def _tag(form: AnswerForm, call: CallForm, name: str, schema: dict[str, Any]) -> StructuralTag:
    if call.arguments.encoding != "json" or call.arguments.quote or call.id_place != "none":
        raise InvalidArgument(
            "tools: no grammar can be made of calls in the form of this model",
            hint="use the tool choice auto, without `strict`",
        )
    opening, closing = ("[", "]") if call.array else ("", "")
    begin = f"{call.section_begin}{opening}{call.begin}"
    end = f"{call.end}{closing}{call.section_end}"
    if call.layout == "json":
        begin += f'{{"{call.name_key}": {json_text(name)}, "{call.arguments_key}": '
        end = "}" + end
    elif call.layout == "keyed":
        begin += f"{{{json_text(name)}: "
        end = "}" + end
    else:
        begin += call.name_begin + name + call.name_end + call.arguments.begin
        end = call.arguments.end + end
    begin, mark = begin.lstrip(), call.triggers[0]
    is_content = any(block.begin.lstrip().startswith(mark) for block in form.content)
    trigger = begin if is_content else mark
    return StructuralTag(begin=begin, end=end.rstrip(), trigger=trigger, schema=schema)


def _without_mark(tag: StructuralTag, mark: str) -> StructuralTag:
    begin = tag.begin.removeprefix(mark)
    return msgspec.structs.replace(tag, begin=begin, trigger=begin)


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

"""The grammar of an answer that calls tools, in the form of the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ...backends.answer_form import AnswerForm, CallForm
from ...backends.errors import InvalidArgument
from ...backends.params import StructuralTag, StructuralTags, ToolChoice, structural_tag_text
from .call_grammar import (
    ANY_ARGUMENTS,
    NO_ARGUMENTS,
    before_calls,
    call_tags,
    closing_of,
)

AUTO, NO_CALLS, REQUIRED = "auto", "none", "required"
"""The modes of a `ToolChoice`."""
_TOKEN = re.compile(r"<[^<>]+>|\[[A-Z_]+\]")
"""The form of most special tokens."""


def constraint_of(
    form: AnswerForm,
    tools: Iterable[Mapping[str, Any]],
    choice: ToolChoice,
    *,
    parallel: bool,
    opened: str,
    thinks: bool = True,
) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that make an answer call *tools* in this *form*.

    The functions are those that *choice* names, or all. If its mode is `auto`, the answer may call
    any of them, and only the arguments of functions with `strict` follow their schemas; a form
    without a mark then has no grammar, because any answer may begin like a call. If the mode is
    `required`, the answer must call one, and the arguments follow its schema; before that it may
    reason if it *thinks*, or if the prompt has begun reasoning. *opened* is the mark of the answer
    with which the prompt ends.

    :raises InvalidArgument: no grammar can be made of the tools.
    """
    every = [tool["function"] for tool in tools]
    functions = [f for f in every if not choice.names or f["name"] in choice.names]
    required, call = choice.mode == REQUIRED, form.calls[0]
    if required:
        schemas = {f["name"]: _schema(f) for f in functions}
    elif _has_own_mark(form, call) and (
        choice.names or any(f.get("strict") is True for f in functions)
    ):
        schemas = {f["name"]: _schema(f) if f.get("strict") else ANY_ARGUMENTS for f in functions}
    else:
        return {}
    before = before_calls(form, opened, thinks=thinks) if required else ()
    if call.whole and call.layout == "json" and not before:
        return {"json_schema": _json_schema(schemas, call.arguments_key)}
    with _tools_refused():
        found = call_tags(form, call, schemas)
    tags, more = [each.tag for each in found], [each.again for each in found]
    opened = opened if all(tag.begin.startswith(opened) for tag in tags) else ""
    if opened and required:
        tags = [_without_mark(tag, opened) for tag in tags]
    several = parallel and not call.whole
    return {
        "structural_tag": _tags_text(
            StructuralTags(
                tags=tuple(tags),
                at_least_one=required,
                stop_after_first=required,
                opened="" if required else opened,
                more=tuple(more) if several else (),
                closing=closing_of(call),
                before=before,
            )
        )
    }


def _has_own_mark(form: AnswerForm, call: CallForm) -> bool:
    """Return whether free text up to a call ends with a mark that begins nothing else. Special
    tokens end it alone.
    """
    if call.whole:
        return False
    first = call.triggers[0]
    token = _TOKEN.match(first)
    blocks = (*form.reasoning, *form.content)
    begins = [block.begin.strip() for block in blocks if block.anywhere]
    return token is None or not any(begin.startswith(token.group()) for begin in begins)


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    return {**ANY_ARGUMENTS, **parameters} if parameters else NO_ARGUMENTS


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


def _without_mark(tag: StructuralTag, mark: str) -> StructuralTag:
    begin = tag.begin.removeprefix(mark)
    return msgspec.structs.replace(tag, begin=begin, trigger=begin)


def _tags_text(tags: StructuralTags) -> str:
    with _tools_refused():
        return structural_tag_text(tags)


@contextmanager
def _tools_refused() -> Iterator[None]:
    """Report a grammar that cannot be made."""
    try:
        yield
    except ValueError as exc:
        raise InvalidArgument(
            f"tools: no grammar can be made of them: {exc}",
            hint="use fewer functions, or shorter names and schemas",
        ) from None

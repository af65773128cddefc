"""The grammar of required calls, by the form of the model's template."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.params import (
    ToolChoice,
    adjust_parameters,
    read_options,
    tool_choice_of,
)
from inferd.backends.tool_formats import KNOWN_FORMS
from inferd.sessions.answers.call_grammar import NO_ARGUMENTS
from inferd.sessions.answers.calls import join_parts
from inferd.sessions.answers.constraint import constraint_of
from inferd.sessions.answers.parser import AnswerParser
from inferd.sessions.answers.values import may_be_text
from tests.sessions.answers.form_names import ToolFormat

ADD = {
    "name": "add",
    "parameters": {"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}},
}
NOW = {"name": "now"}


def free(form: str, tools: Any, choice: ToolChoice) -> bool:
    """Return whether an answer has no grammar."""
    return constraint_of(KNOWN_FORMS[form], tools, choice, parallel=True, opened="") == {}


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": function} for function in (ADD, NOW)
]
NAMED = {"type": "function", "function": {"name": "add"}}
MARKED = [f for f in ToolFormat if f not in (ToolFormat.NONE, ToolFormat.JSON, ToolFormat.LLAMA)]


def tags(form: ToolFormat, choice: Any, tools: Any = TOOLS, **options: Any) -> dict[str, Any]:
    opened = ">>>" if form is ToolFormat.FUNCTIONARY else ""
    settings: dict[str, Any] = {"parallel": True, "opened": opened} | options
    found = constraint_of(KNOWN_FORMS[form], tools, tool_choice_of(choice), **settings)
    return dict(json.loads(found["structural_tag"])) if found else {}


@pytest.mark.parametrize("form", MARKED)
def test_a_required_call_is_one_that_the_parser_reads(form: ToolFormat) -> None:
    found = tags(form, "required")
    assert found["at_least_one"] and found["stop_after_first"], "nothing but calls may follow"
    assert found["tags"][1]["schema"] == NO_ARGUMENTS, "it has no parameters"
    for tag, name in zip(found["tags"], ("add", "now"), strict=True):
        answer = tag["begin"] + "{}" + tag["end"]
        prompt = ">>>" if form is ToolFormat.FUNCTIONARY else ""
        parser = AnswerParser(KNOWN_FORMS[form], {"add": {}, "now": {}}, prompt=prompt)
        parts = [*parser.parse(answer).parts, *parser.finish().parts]
        assert [(c.name, c.arguments) for c in join_parts(parts)] == [(name, "{}")]
        assert parser is not None and tag["begin"].startswith(tag["trigger"])


@pytest.mark.parametrize("form", MARKED)
def test_a_named_function_and_a_single_call_narrow_the_choice(form: ToolFormat) -> None:
    assert len(tags(form, NAMED)["tags"]) == 1
    own: Any = ADD["parameters"]
    assert tags(form, NAMED)["tags"][0]["schema"] == {"type": "object", **own}
    assert "more" not in tags(form, "required", parallel=False)
    assert len(tags(form, "required", opened="")["more"]) == 2


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("form", MARKED)
def test_only_allowed_functions_can_be_called(form: ToolFormat) -> None:
    for mode in ("auto", "required"):
        found = tags(form, allowed(mode, "now"))
        [tag] = found["tags"]
        assert "now" in tag["begin"] and found.get("at_least_one", False) == (mode == "required")
        assert len(tags(form, allowed(mode, "now", "add"))["tags"]) == 2
    assert tags(form, "auto") == {}


@pytest.mark.parametrize("form", [ToolFormat.JSON, ToolFormat.LLAMA])
def test_a_form_without_a_mark_is_a_schema(form: ToolFormat) -> None:
    key = "arguments" if form is ToolFormat.JSON else "parameters"
    assert free(form, TOOLS, ToolChoice("auto", ("add",)))
    choices: list[tuple[Any, tuple[str, ...]]] = [
        ("required", ("add", "now")),
        (NAMED, ("add",)),
        (allowed("required", "now"), ("now",)),
    ]
    for choice, names in choices:
        read = tool_choice_of(choice)
        found = constraint_of(KNOWN_FORMS[form], TOOLS, read, parallel=True, opened="")
        schema = json.loads(found["json_schema"])
        for name in ("add", "now"):
            for arguments, fits in (({"a": 1}, name == "add"), ({"a": "x"}, False), ({}, True)):
                validator = jsonschema.Draft202012Validator(schema)
                valid = validator.is_valid({"name": name, key: arguments})
                assert valid == (fits and name in names)


@pytest.mark.parametrize("form", ToolFormat)
def test_without_strict_functions_an_answer_is_free(form: ToolFormat) -> None:
    if form is not ToolFormat.NONE:
        assert free(form, TOOLS, ToolChoice("auto"))


@pytest.mark.parametrize("form", MARKED)
def test_only_strict_functions_follow_their_schemas(form: ToolFormat) -> None:
    strict = {"type": "function", "function": ADD | {"strict": True}}
    tools: list[dict[str, Any]] = [strict, TOOLS[1]]
    found = tags(form, "auto", tools, opened="")
    assert [tag["schema"] == {"type": "object"} for tag in found["tags"]] == [False, True]
    assert "at_least_one" not in found
    assert free("llama", tools, tool_choice_of("auto"))


def test_a_strict_call_that_the_prompt_opens_is_known_to_be_open() -> None:
    strict: list[Any] = [{"type": "function", "function": ADD | {"strict": True}}]
    assert tags(ToolFormat.FUNCTIONARY, "auto", strict)["opened"] == ">>>"
    assert "opened" not in tags(ToolFormat.FUNCTIONARY, "auto", strict, opened="")
    assert "opened" not in tags(ToolFormat.FUNCTIONARY, "required", strict)


def test_too_many_schemas_are_refused() -> None:
    long = {"name": "long", "parameters": {"description": "x" * 300_000}}
    with pytest.raises(InvalidArgument, match="tools: no grammar"):
        tags(ToolFormat.HERMES, "required", [{"type": "function", "function": long}])


@pytest.mark.parametrize("form", ["gemma-4", "minimax-m3"])
def test_schemas_that_refer_to_themselves_are_refused_before_they_fill_the_memory(
    form: str,
) -> None:
    node = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/node"} for i in range(9)}}
    schema = {"type": "object", "properties": {"a": node}, "$defs": {"node": node}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    with pytest.raises(InvalidArgument, match="more than 8192 values"):
        constraint_of(
            KNOWN_FORMS[form], tools, tool_choice_of("required"), parallel=True, opened=""
        )


def test_alternatives_that_refer_to_themselves_are_read_once() -> None:
    again = {"$ref": "#/$defs/node"}
    root = {"$defs": {"node": {"anyOf": [again] * 9}}}
    assert not may_be_text(again, root)
    root["$defs"]["node"]["anyOf"].append({"type": "string"})
    assert may_be_text(again, root)


def test_a_choice_is_read_in_openais_forms() -> None:
    for value in ("auto", "None", "required", NAMED, allowed("auto", "add", "now")):
        expected = value.lower() if isinstance(value, str) else value
        assert read_options({"tool_choice": value}).values == {"tool-choice": expected}
    tools = read_options({"tools": TOOLS}).values
    assert adjust_parameters(tools | {"tool-choice": NAMED})[1] == {}
    assert adjust_parameters({"tool-choice": "required"})[1] == {
        "tool-choice": "the turn has no tools"
    }
    other = {"type": "function", "function": {"name": "sub"}}
    for values, says in (
        ({"tool-choice": other}, "no tool is named 'sub'"),
        ({"tool-choice": "required", "json-schema": "{}"}, "has its own grammar"),
        ({"tool-choice": NAMED, "grammar": 'root ::= "a"'}, "has its own grammar"),
        ({"tool-choice": allowed("auto", "add", "sub")}, "no tool is named 'sub'"),
        ({"tool-choice": allowed("required", "add"), "regex": "a"}, "has its own grammar"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            adjust_parameters(tools | values)
    assert adjust_parameters(tools | {"tool-choice": allowed("auto", "add"), "regex": "a"})[1] == {}


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"type": "allowed_tools"}, "missing required field `allowed_tools`"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "`allowed_tools`; it is {"),
        (allowed("none", "add"), "Invalid enum value 'none'"),
        (allowed("auto"), "length >= 1"),
        (allowed("auto", "a b"), "matching regex"),
        ({"type": "allowed", "allowed_tools": {}}, "is neither auto, none, required"),
    ],
)
def test_a_choice_in_another_form_is_refused(choice: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_options({"tool_choice": choice})
    assert says in caught.value.message

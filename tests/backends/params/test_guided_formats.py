"""Formats of answers as vLLM spells them: `structured_outputs`, and the older `guided_…`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.params import adjust_parameters, read_options

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAGS = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}
GBNF, LARK = 'root ::= "a"+', 'start: "a"+'


def read(**options: Any) -> dict[str, Any]:
    values = read_options(options, strict=True).values
    adjust_parameters(values)
    if "json-schema" in values:
        values["json-schema"] = json.loads(values["json-schema"])
    return values


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("json", SCHEMA, {"json-schema": SCHEMA}),
        ("json", json.dumps(SCHEMA), {"json-schema": SCHEMA}),
        ("json", True, {"json-schema": True}),
        ("json_object", True, {"json-schema": {"type": "object"}}),
        ("regex", "[a-c]+", {"regex": "[a-c]+"}),
        ("choice", ["yes", "no", "yes"], {"grammar": 'root ::= "yes" | "no"'}),
        ("choice", ['a"b\\\n'], {"grammar": r'root ::= "a\"b\\\n"'}),
        ("grammar", GBNF, {"grammar": GBNF}),
        ("grammar", LARK, {"lark": LARK}),
    ],
)
def test_each_format_is_read_in_both_forms(name: str, value: Any, expected: Any) -> None:
    assert read(structured_outputs={name: value}) == expected
    assert read(**{f"guided_{name}": value}) == expected


def test_a_structural_tag_may_be_a_text() -> None:
    expected = read(structural_tag=TAGS)
    for value in (TAGS, json.dumps(TAGS)):
        assert read(structured_outputs={"structural_tag": value}) == expected


@pytest.mark.parametrize(
    ("pattern", "layout"),
    [("", "compact"), (r"[\n\t ]*", "spaced"), (r"\s{0,2}", "spaced"), ("\n?", "compact")],
)
def test_the_white_space_of_an_answer_matches_the_pattern(pattern: str, layout: str) -> None:
    expected = {"json-schema": SCHEMA, "json-whitespace": layout}
    assert read(guided_json=SCHEMA, guided_whitespace_pattern=pattern) == expected
    assert read(structured_outputs={"json": SCHEMA, "whitespace_pattern": pattern}) == expected


def test_options_of_vllms_engines_have_no_effect() -> None:
    form = {
        "json": SCHEMA,
        "regex": None,
        "disable_any_whitespace": True,
        "disable_fallback": False,
    }
    assert read(structured_outputs=form) == {"json-schema": SCHEMA}
    assert read(guided_json_object=False) == {}
    options = read_options({"guided_decoding_backend": "xgrammar"})
    assert options.ignored == ["guided_decoding_backend"] and not options.values


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guided_choice": []}, "guided_choice: [] is not a list of texts"),
        ({"guided_choice": "yes"}, "guided_choice: 'yes' is not a list of texts"),
        ({"guided_choice": [1]}, "guided_choice: [1] is not a list of texts"),
        ({"guided_json": "{"}, "guided_json: it is not valid JSON"),
        ({"guided_json": [1]}, "guided_json: [1] is not a schema"),
        ({"guided_json": "1"}, "guided_json: '1' is not a schema"),
        ({"guided_regex": 1}, "guided_regex: 1 is not a text"),
        ({"guided_grammar": {}}, "guided_grammar: {} is not a text"),
        ({"guided_json_object": 1}, "guided_json_object: 1 is neither true nor false"),
        ({"guided_whitespace_pattern": "("}, "guided_whitespace_pattern: '(' is not a regular"),
        ({"guided_whitespace_pattern": " "}, "requires white space"),
        ({"guided_whitespace_pattern": " *" * 21}, "is not a regular expression of white space"),
        (
            {"structured_outputs": {}},
            "structured_outputs: it has 0 formats of the answer; give one",
        ),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "it has 2 formats"),
        ({"structured_outputs": {"json_object": False}}, "it has 0 formats"),
        ({"structured_outputs": {"xml": 1}}, "there is no 'xml'; use json, regex, choice"),
        ({"structured_outputs": "json"}, "structured_outputs: 'json' is not a map"),
        ({"structured_outputs": {"choice": ["a"]}, "guided_choice": ["b"]}, "is given too"),
        ({"guided_json": {}, "json_schema": {}}, "json_schema: guided_json is given too"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "is given too"),
        ({"guided_json": {}, "guided_regex": "a"}, "set one of them"),
    ],
)
def test_a_wrong_format_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(**options)
    assert says in caught.value.message

"""Reading of structural tags and of `response_format`, and formats that exclude each other."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.params import (
    FORMATS,
    StructuralTag,
    StructuralTags,
    adjust_parameters,
    read_options,
    sampling_params,
    structural_tag_text,
)
from inferd.backends.params.structural_tags import (
    MARK_BYTES_MAX,
    TAGS_BYTES_MAX,
    TAGS_MAX,
    TRIGGERS_MAX,
)

PART = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
PLAIN = {"structures": [PART], "triggers": ["<f="]}
TAGGED = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f="],
        "tags": [
            {
                "type": "tag",
                "begin": "<f=a>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</f>",
            }
        ],
        "at_least_one": False,
    },
}
READ = StructuralTags(
    tags=(StructuralTag(begin="<f=a>", end="</f>", trigger="<f=", schema={"type": "integer"}),)
)
VALUES: dict[str, Any] = {
    "json-schema": {"type": "object"},
    "grammar": 'root ::= "a"',
    "lark": 'start: "a"',
    "regex": "a",
    "structural-tag": PLAIN,
}


def read(**values: Any) -> dict[str, Any]:
    return read_options({k.replace("_", "-"): v for k, v in values.items()}, strict=True).values


def tags_of(text: str) -> StructuralTags:
    return msgspec.json.decode(text, type=StructuralTags)


@pytest.mark.parametrize("value", [PLAIN, {"type": "structural_tag", **PLAIN}, TAGGED])
def test_all_forms_are_read_as_maps_and_as_json(value: dict[str, Any]) -> None:
    forms: list[dict[str, Any]] = [{"structural-tag": value}, {"structural_tag": json.dumps(value)}]
    if "type" in value:
        forms.append({"response_format": value})
    for form in forms:
        values = read_options(form, strict=True).values
        assert list(values) == ["structural-tag"] and tags_of(values["structural-tag"]) == READ
        assert sampling_params(values, 0).has_grammar
        again = read_options(values, strict=True).values
        assert again == values, "the value in force can be given again"


def test_tags_of_a_program_are_the_same_as_those_that_are_read() -> None:
    assert structural_tag_text(READ) == read(structural_tag=PLAIN)["structural-tag"]
    assert read(structural_tag="") == {"structural-tag": ""}


def test_other_contents_are_read() -> None:
    for content, field, value in (
        ({"type": "regex", "pattern": "a+"}, "regex", "a+"),
        ({"type": "grammar", "grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"type": "json_schema", "json_schema": True}, "schema", True),
    ):
        tag = {"begin": "<f=", "content": content, "end": ""}
        form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag]}
        text = read(structural_tag={"format": form | {"at_least_one": True}})["structural-tag"]
        tags = tags_of(text)
        assert getattr(tags.tags[0], field) == value and tags.at_least_one


def without(key: str) -> dict[str, Any]:
    return {"structures": [{k: v for k, v in PART.items() if k != key}], "triggers": ["<f="]}


def with_content(content: Any, **fields: Any) -> dict[str, Any]:
    tag = {"begin": "<f=", "content": content, "end": ""}
    form = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag], **fields}
    return {"type": "structural_tag", "format": form}


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (7, "not a map"),
        ("{", "not valid JSON"),
        ([], "not a map"),
        ({}, "structures"),
        (without("begin"), "begin"),
        (without("end"), "end"),
        ({"structures": [], "triggers": []}, "0 structures"),
        ({"structures": [PART] * (TAGS_MAX + 1), "triggers": ["<"]}, "129 structures; there are 1"),
        ({"structures": [PART], "triggers": []}, "none of the triggers"),
        ({"structures": [PART], "triggers": ["<f=", "<g="]}, "no structure begins with it"),
        ({"structures": [PART], "triggers": [""]}, "does not start with its trigger"),
        ({"structures": [PART, PART | {"begin": "a<f"}], "triggers": ["<f", "a<f"]}, "contains"),
        ({"structures": [PART | {"end": "x" * (MARK_BYTES_MAX + 1)}], "triggers": ["<f"]}, "1024"),
        ({"structures": [PART | {"end": "\0"}], "triggers": ["<f"]}, "NUL"),
        ({"structures": [PART | {"extra": 1}], "triggers": ["<f"]}, "extra"),
        (PLAIN | {"stop": 1}, "stop"),
        (
            {
                "structures": [PART | {"begin": f"{i:03}"} for i in range(TRIGGERS_MAX + 1)],
                "triggers": [f"{i:03}" for i in range(TRIGGERS_MAX + 1)],
            },
            "33 triggers; 32",
        ),
        ({"format": {"type": "sequence"}}, "type 'sequence' is not supported"),
        ({"format": "tag"}, "type 'tag' is not supported"),
        (with_content({"type": "any_text"}), "content: the type 'any_text' is not supported"),
        (with_content({"type": "regex", "pattern": ""}), "give one of"),
        (with_content({"type": "regex", "pattern": 3}), "str"),
        (with_content({"type": "regex", "pattern": "a", "excludes": []}), "excludes"),
        (with_content({"type": "json_schema"}), "give one of"),
        (with_content({"type": "regex", "pattern": "a"}, separator=","), "separator"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_tags_are_refused(value: object, cause: str) -> None:
    with pytest.raises(InvalidArgument, match=cause) as caught:
        read(structural_tag=value)
    assert caught.value.hint


def test_too_many_bytes_are_refused() -> None:
    big = {"structures": [PART | {"schema": {"enum": ["x" * TAGS_BYTES_MAX]}}], "triggers": ["<"]}
    for value in (big, json.dumps(big)):
        with pytest.raises(InvalidArgument, match="bytes of JSON"):
            read(structural_tag=value)


@pytest.mark.parametrize("names", list(itertools.combinations(FORMATS, 2)), ids="-".join)
def test_two_formats_exclude_each_other_and_both_are_named(names: tuple[str, str]) -> None:
    values = read_options({name: VALUES[name] for name in names}).values
    with pytest.raises(InvalidArgument, match=f"{names[0]}: {names[1]} is set too"):
        adjust_parameters(values)
    adjust_parameters(values | {names[0]: ""})


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_with_a_format_ends_and_keeps_its_beginning(name: str) -> None:
    values = read_options({name: VALUES[name], "ignore-eos": True, "ctx-shift": True}).values
    adjusted, reasons = adjust_parameters(values)
    assert not adjusted["ignore-eos"] and not adjusted["ctx-shift"] and len(reasons) == 2


def test_structural_tags_have_their_own_triggers_and_no_end() -> None:
    values = read_options({"structural-tag": PLAIN, "stop-grammar": True}).values
    adjusted, reasons = adjust_parameters(values)
    assert adjusted["stop-grammar"] is False and "may always end" in reasons["stop-grammar"]
    triggered = read_options({"structural-tag": PLAIN, "grammar-triggers": "<f"}).values
    with pytest.raises(InvalidArgument, match="structural-tag: it has its own triggers"):
        adjust_parameters(triggered)

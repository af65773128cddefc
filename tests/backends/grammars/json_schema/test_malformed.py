"""Errors in schemas, which are refused with or without `schema-lenient`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker

pytestmark = pytest.mark.process
NULL = {"type": "null"}
_TYPES: tuple[Any, ...] = (
    "int",
    "str",
    "text",
    "Integer",
    "any",
    "float",
    "",
    None,
    3,
    [],
    ["string", "int"],
    {},
)
_SCHEMA_VALUES: tuple[Any, ...] = (3, "x", None, [])
_LIST_VALUES: tuple[Any, ...] = ([], {}, 3)
_MAP_VALUES: tuple[tuple[Any, str], ...] = (([], ""), ({"a/b": 3}, "/a~1b"))
MALFORMED: list[tuple[Any, str]] = [
    *(({"type": value}, "#/type") for value in _TYPES),
    *(
        ({keyword: value}, f"#/{keyword}")
        for keyword in ("additionalItems", "additionalProperties", "contains", "else", "if", "not")
        for value in _SCHEMA_VALUES
    ),
    *(({keyword: 3}, f"#/{keyword}") for keyword in ("propertyNames", "then", "items")),
    *(({f"unevaluated{what}": []}, f"#/unevaluated{what}") for what in ("Items", "Properties")),
    *(
        ({keyword: value}, f"#/{keyword}")
        for keyword in ("allOf", "anyOf", "oneOf", "prefixItems")
        for value in _LIST_VALUES
    ),
    *(({keyword: [{}, 3]}, f"#/{keyword}/1") for keyword in ("allOf", "anyOf", "items")),
    *(
        ({keyword: value}, f"#/{keyword}{path}")
        for keyword in ("dependentSchemas", "patternProperties", "properties")
        for value, path in _MAP_VALUES
    ),
    *(
        ({keyword: value}, f"#/{keyword}")
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        for value in ("3", True, None)
    ),
    *(({"multipleOf": value}, "#/multipleOf") for value in (0, -1)),
    *(
        ({keyword: value}, f"#/{keyword}")
        for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties")
        for value in (-1, 1.5, "3", True)
    ),
    *(({keyword: "3"}, f"#/{keyword}") for keyword in ("maxProperties", "minContains")),
    ({"required": "a"}, "#/required"),
    ({"required": ["a", 3]}, "#/required/1"),
    ({"properties": {"a": {"required": True}}}, "#/properties/a/required"),
    ({"dependentRequired": {"a": "b"}}, "#/dependentRequired/a"),
    ({"dependencies": {"a": "b"}}, "#/dependencies/a"),
    *(({"uniqueItems": value}, "#/uniqueItems") for value in (1, "true", None)),
    *(({"enum": value}, "#/enum") for value in _LIST_VALUES[1:]),
    *(({"pattern": value}, "#/pattern") for value in (3, ["a"])),
    *(({"format": value}, "#/format") for value in (3, None)),
    *(
        ({"$ref": value, "$defs": {"a": NULL}}, "#/$ref")
        for value in (3, None, "#/$defs/none", "#/$defs/a/none", "#none", "#/$defs/a/type", "#/x")
    ),
    ({"anyOf": [NULL, {"$ref": "#/$defs/Peson"}]}, "#/anyOf/1/$ref"),
    ({"not": {"type": "int"}}, "#/not/type"),
    ({"$ref": "#/components/x", "components": {"x": {"type": "int"}}}, "#/components/x/type"),
    *(
        ({"type": "string", "pattern": pattern}, "#/pattern")
        for pattern in (
            "a{3,2}",
            "[z-a]",
            "[a",
            "(a",
            "a)",
            "*a",
            "a**",
            "a)|(b",
            "(?<n>a)(?<n>b)",
            "a\\",
        )
    ),
    ({"type": "object", "patternProperties": {"(": {}}}, "#/patternProperties/("),
]
"""Schemas with errors, and the path of each one."""


WELL_FORMED: dict[str, Any] = {
    "bounds of draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
    },
    "counts with a fraction of zero": {"type": "string", "minLength": 2.0, "maxLength": 3.0},
    "a list of items": {"items": [NULL]},
    "no required property": {"type": "object", "required": []},
    "annotations": {"title": 3, "default": {"type": "int"}, "examples": 3, "x-type": "int"},
    "values": {"enum": [{"type": "int"}], "type": "object"},
    "names of properties": {"properties": {"type": NULL, "required": NULL, "$ref": NULL}},
    "unused definitions": {"type": "null", "$defs": {"a": {"type": "int"}}},
    "a reference to an anchor": {"$ref": "#a", "$defs": {"x": {"$anchor": "a", "type": "null"}}},
    "an escaped reference": {"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": NULL}},
}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize(
    ("schema", "path"), MALFORMED, ids=[f"{path} {json.dumps(s)[:50]}" for s, path in MALFORMED]
)
def test_an_error_in_a_schema_is_refused_with_its_path(
    checker: GrammarChecker, schema: Any, path: str, lenient: bool
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checker.check(CheckRequest(schema=json.dumps(schema), lenient=lenient))
    assert caught.value.data == {"path": path} and caught.value.hint
    assert str(caught.value).startswith(f"json-schema: {path}: ")


@pytest.mark.parametrize("name", WELL_FORMED)
def test_a_schema_without_an_error_is_accepted(checker: GrammarChecker, name: str) -> None:
    assert checker.check(CheckRequest(schema=json.dumps(WELL_FORMED[name]))).dropped == []


@pytest.mark.parametrize(
    ("name", "question"),
    [("int", "integer"), ("str", "string"), ("bool", "boolean"), ("Array", "array"), ("x", "")],
)
def test_the_nearest_type_is_suggested(checker: GrammarChecker, name: str, question: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a type") as caught:
        checker.check(CheckRequest(schema=json.dumps({"type": name})))
    assert (f"did you mean '{question}'?" in str(caught.value)) == bool(question)
    assert "types are array, boolean, integer" in caught.value.hint


def test_a_pattern_beyond_the_grammar_is_not_an_error(checker: GrammarChecker) -> None:
    for pattern in ("(?=a)b", r"(a)\1", r"[\w-_]", r"^[\d-x]$", r"\cA", "[^]", r"(?<n>a)\k<n>"):
        schema = json.dumps({"type": "string", "pattern": pattern})
        dropped = checker.check(CheckRequest(schema=schema, lenient=True)).dropped
        assert dropped in ([], ["#/pattern"]), pattern

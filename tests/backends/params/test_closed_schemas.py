"""Schemas that are closed: objects without properties that they do not list."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from inferd.backends.params import close_schema

CITY: dict[str, Any] = {"type": "object", "properties": {"name": {}}, "required": ["name"]}
GOOD, BAD = {"name": "Rome"}, {"name": "Rome", "size": 1}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (CITY, GOOD, BAD),
        ({"properties": {"city": CITY}}, {"city": GOOD}, {"city": BAD}),
        ({"type": "array", "items": CITY}, [GOOD], [GOOD, BAD]),
        ({"anyOf": [CITY, {"type": "null"}]}, GOOD, BAD),
        ({"$ref": "#/$defs/City", "$defs": {"City": CITY}}, GOOD, BAD),
        ({**CITY, "title": "City", "description": "A city."}, GOOD, BAD),
        ({"type": "object", "properties": {}}, {}, GOOD),
    ],
)
def test_objects_have_only_the_properties_that_they_list(
    schema: dict[str, Any], good: Any, bad: Any
) -> None:
    before = repr(schema)
    closed = jsonschema.Draft202012Validator(close_schema(schema))
    assert closed.is_valid(good) and not closed.is_valid(bad)
    assert jsonschema.Draft202012Validator(schema).is_valid(bad)
    assert repr(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": {"type": "integer"}},
        {**CITY, "patternProperties": {"^s": {}}},
        {**CITY, "required": ["name", "size"]},
        {**CITY, "required": "name"},
        {"allOf": [CITY, {"properties": {"size": {}}}]},
        {**CITY, "if": {}, "then": {"properties": {"size": {}}}},
        {"properties": ["name"]},
    ],
)
def test_a_schema_that_may_allow_for_others_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert close_schema(schema) == schema


def test_a_deep_schema_is_closed_down_to_a_level() -> None:
    schema: dict[str, Any] = CITY
    for _ in range(300):
        schema = {"properties": {"part": schema}}
    closed = close_schema(schema)
    assert closed["properties"]["part"]["additionalProperties"] is False

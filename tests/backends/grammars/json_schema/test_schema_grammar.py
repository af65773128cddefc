"""The text of a schema's grammar, as llguidance reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from inferd.backends.grammars.json_schema.schema_grammar import grammars_of_schema

DOCUMENTS: dict[str, Any] = {
    "names and values": {"properties": {"\u20ac\n": {"const": [1.0, -0.0, 1e22, None, "\u00e9"]}}},
    "largest number of 64 bits": {"minimum": -(2**63), "maximum": 2**64 - 1},
    "digits in a text": {"const": "1" * 30},
    "empty": {},
}


def grammar_of(document: dict[str, Any]) -> str:
    [grammar] = grammars_of_schema(document)
    return grammar


def parts_of(grammar: str) -> tuple[Any, Any]:
    """Return the schema in a grammar, and the options that it has for llguidance."""
    [first] = json.loads(grammar)["grammars"]
    options = first["json_schema"].pop("x-guidance")
    return first["json_schema"], options


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_grammar_has_the_schema_and_the_options_as_the_library_writes_them(name: str) -> None:
    document = DOCUMENTS[name]
    schema, options = parts_of(grammar_of(document))
    written = LLMatcher.grammar_from_json_schema(document, overrides=options)
    assert (schema, options) == parts_of(written)
    assert json.dumps(schema) == json.dumps(parts_of(written)[0]), "in the same order"


def test_an_integer_that_would_be_rounded_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON serializable"):
        grammar_of({"const": 10**25})


def test_texts_for_readers_are_left_out_and_properties_of_their_names_are_kept() -> None:
    part = {"$comment": "x", "title": "x", "description": "x", "type": "null"}
    document = part | {"properties": {"title": part, "description": part}, "items": [part]}
    only = {"type": "null"}
    schema, _ = parts_of(grammar_of(document))
    assert schema == only | {"properties": {"title": only, "description": only}, "items": [only]}


def test_a_value_that_looks_like_a_text_for_readers_is_kept() -> None:
    document = {"enum": [{"title": "x"}], "title": {"type": "null"}}
    schema, _ = parts_of(grammar_of(document))
    assert schema == document

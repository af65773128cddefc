"""Equal parts of a schema become one definition, and the language stays the same."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from inferd.backends.grammars.json_schema.document import read_schema, schemas_of, share_parts
from inferd.backends.grammars.json_schema.rewriting import rewritten_schema
from inferd.backends.grammars.json_schema.schema_grammar import grammars_of_schema
from inferd.backends.grammars.trial import CheckRequest
from inferd.backends.grammars.trial_program import check_grammar

WALKS, STEPS = 6, 60
NAMED: dict[str, Any] = {
    "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip


def choice(depth: int) -> dict[str, Any]:
    """Return an object that has one of three properties, each with such an object again."""
    within = choice(depth - 1) if depth else NAMED
    return {
        "type": "object",
        "oneOf": [{"required": [name]} for name in "abc"],
        "properties": {name: within | {"title": name} for name in "abc"},
        "additionalProperties": False,
    }


SHARED: dict[str, Any] = {
    "equal properties": {"properties": {"a": NAMED, "b": NAMED}},
    "equal items": {"prefixItems": [{"items": NAMED}, {"items": NAMED}]},
    "equal values of names that match a pattern": {
        "type": "object", "patternProperties": {"^a": NAMED}, "additionalProperties": NAMED},
    "parts of alternatives": choice(0),
    "parts of alternatives within each other": choice(2),
    "alternatives that narrow a part": {
        "type": "object", "properties": {"a": NAMED, "b": NAMED},
        "anyOf": [{"properties": {"a": {"properties": {"n": {"minimum": 3}}}}},
                  {"required": ["b"]}]},
    "parts that contain themselves": {
        "type": "object", "additionalProperties": False,
        "properties": {name: {"type": "array", "items": {"$ref": "#"}} for name in "ab"}},
    "a reference to a part": {
        "type": "object", "properties": {"a": NAMED, "b": NAMED, "c": {"$ref": "#/properties/a"}}},
    "an old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#", "$id": "https://example.org/a.json",
        "definitions": {"x": NAMED},
        "properties": {"a": NAMED, "b": NAMED, "c": {"$ref": "#/definitions/x"}}},
}  # fmt: skip
NOT_SHARED: dict[str, Any] = {
    "a reference into a part": {
        "properties": {"a": NAMED, "b": NAMED, "c": {"$ref": "#/properties/a/properties/n"}}},
    "a reference to a name": {
        "properties": {"a": NAMED | {"$anchor": "x"}, "b": NAMED, "c": {"$ref": "#x"}}},
    "a part with an address": {
        "properties": {"a": NAMED | {"$id": "https://example.org/a"}, "b": NAMED, "c": NAMED}},
    "the same name": {"$defs": {"shared-part-0": {}}, "properties": {"a": NAMED, "b": NAMED}},
    "definitions of another form": {"$defs": 1, "properties": {"a": NAMED, "b": NAMED}},
    "different parts": {"properties": {"a": NAMED, "b": NAMED | {"required": []}}},
    "small parts": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}},
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_a_grammar_with_shared_parts_allows_the_same_answers(name: str) -> None:
    shared, plain = grammars_of_schema(read_schema(json.dumps(SHARED[name])))
    assert "shared-part" in shared and "shared-part" not in plain
    tokenizer = LLTokenizer("byte")
    for seed in range(WALKS):
        one, other = (LLMatcher(tokenizer, grammar) for grammar in (shared, plain))
        source = random.Random(seed)
        for _ in range(STEPS):
            mask = one.compute_bitmask()
            assert not one.is_error() and mask == other.compute_bitmask()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:128]).tolist()
            marks = [token for token in allowed if chr(token) in '"{}[]:,abcn']
            if not allowed:
                break
            token = source.choice(marks or allowed)
            assert one.consume_token(token) and other.consume_token(token)


@pytest.mark.parametrize("name", NOT_SHARED)
def test_parts_are_left_where_a_reference_may_lead_or_nothing_is_gained(name: str) -> None:
    document = rewritten_schema(NOT_SHARED[name])
    before = json.dumps(document)
    assert not share_parts(document, schemas_of(document))
    assert json.dumps(document) == before


def test_alternatives_within_each_other_do_not_multiply_the_grammar() -> None:
    sizes = []
    for depth in range(1, 4):
        grammar, _ = grammars_of_schema(read_schema(json.dumps(choice(depth))))
        sizes.append(len(grammar))
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert grown[0] == grown[1] < 1000


def test_a_schema_that_is_refused_only_with_shared_parts_is_compiled_without() -> None:
    never = {"type": "object", "properties": {"x": False}, "required": ["x"]}
    document = {"type": "object", "properties": {"a": never, "b": never}}
    reply = check_grammar(CheckRequest(schema=json.dumps(document)))
    assert reply.refusal is None and "shared-part" not in reply.grammar

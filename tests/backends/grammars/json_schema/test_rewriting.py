"""Rewritten keywords: the answers that their grammars allow fit the schema as it was."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferd.backends.errors import InferdError
from inferd.backends.grammars.json_schema.rewriting import rewritten_schema
from inferd.backends.grammars.trial import CheckRequest
from inferd.backends.grammars.trial_program import check_grammar
from tests.backends.walking import Walker, compiler_of, vocabulary
from tests.repetitions import repetitions
from tests.tiny_gguf import write_tiny

NAMES = ("a", "b", "c")
VALUES: list[Any] = [None, True, 0, 1, 2.5, 7, "", "a", "ab", "/a", [], [1], [1, 1], [1, "a"]]
VALUES += [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in itertools.combinations(NAMES, count)
    for values in itertools.product((1, "a"), repeat=count)
]
INTEGER, STRING, OBJECT = {"type": "integer"}, {"type": "string"}, {"type": "object"}


def requires(*names: str, **more: Any) -> dict[str, Any]:
    return {"required": list(names), **more}


def is_a(name: str, kind: object) -> dict[str, Any]:
    return {"properties": {name: {"const": kind}}}


def of(definitions: dict[str, Any], *alternatives: str) -> dict[str, Any]:
    return {"oneOf": [{"$ref": f"#/$defs/{n}"} for n in alternatives], "$defs": definitions}


TAGGED = {
    "x": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
    "y": {"type": "object", "properties": {"a": {"enum": ["a", 7]}}, "required": ["a"]},
    "z": {"type": "array"},
}
ACCEPTED: dict[str, Any] = {
    "alternatives that differ by required properties": {
        "type": "object", "oneOf": [requires("a"), requires("b"), requires("c")]},
    "such alternatives without a type": {"oneOf": [requires("a"), requires("b")]},
    "such alternatives beside properties": {
        "type": "object", "properties": {"a": INTEGER, "b": STRING},
        "oneOf": [requires("b"), requires("a")], "additionalProperties": False},
    "several required properties": {
        "type": "object", "oneOf": [requires("a", "b"), requires("a", "c")]},
    "objects with other properties": {
        "oneOf": [OBJECT | requires("a"), OBJECT | requires("b"), STRING]},
    "closed objects": {"oneOf": [
        requires("a", type="object", properties={"a": {}}, additionalProperties=False),
        requires("b", type="object", properties={"b": {}}, additionalProperties=False)]},
    "references": of(TAGGED, "x", "y", "z"),
    "references to references": of(TAGGED | {"w": {"allOf": [{"$ref": "#/$defs/y"}]}}, "x", "w"),
    "ranges": {"oneOf": [{"type": "number", "maximum": 1},
                         {"type": "number", "exclusiveMinimum": 1, "maximum": 3},
                         {"type": "integer", "minimum": 4}]},
    "constants after another keyword": {"type": "integer", "oneOf": [{"const": 0}, {"const": 7}]},
    "one alternative": {"oneOf": [STRING]},
    "nested alternatives": {
        "oneOf": [{"anyOf": [INTEGER, STRING]}, {"oneOf": [OBJECT, {"type": "null"}]}]},
    "a property that must be missing": {"not": requires("a")},
    "properties that may not be together": {"type": "object", "not": requires("a", "b")},
    "properties none of which may be there": {
        "type": "object", "not": {"anyOf": [requires("a"), requires("b")]}},
    "a type": {"not": {"type": ["object", "array"]}},
    "integers": {"not": INTEGER},
    "values beside an enum": {"enum": [1, "a", None, 0], "not": {"enum": [1, None]}},
    "a value beside an enum": {"enum": [1, "a", True], "not": {"const": 1}},
    "nothing": {"not": False, "type": "string"},
    "a dependency": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependencies": {"type": "object", "dependentRequired": {"a": ["b"], "b": ["c"]}},
    "a dependency of a required property": {
        "type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}},
    "a dependency that is met": requires("b", type="object", dependentRequired={"a": ["b"]}),
    "a dependent schema": {
        "type": "object", "dependentSchemas": {"a": {"properties": {"b": STRING}}}},
    "an impossible property": {"type": "object", "dependentSchemas": {"a": False}},
    "names of a list": {
        "type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER},
    "names of a list beside properties": {
        "type": "object", "properties": {"a": INTEGER, "c": {}}, "propertyNames": {"enum": ["a"]}},
    "names of a pattern": {
        "type": "object", "propertyNames": {"type": "string", "pattern": "^[ab]$"}},
    "names of any form": {"type": "object", "propertyNames": {"type": "string"}},
    "properties that nothing evaluates": {
        "type": "object", "properties": {"a": {}}, "unevaluatedProperties": INTEGER},
    "evaluated properties": {
        "type": "object", "additionalProperties": INTEGER, "unevaluatedProperties": False},
    "items that nothing evaluates": {
        "type": "array", "prefixItems": [INTEGER], "unevaluatedItems": False},
    "unique items": {"type": "array", "uniqueItems": True, "maxItems": 1},
    "items that need not be unique": {"type": "array", "uniqueItems": False},
    "no items": {"type": "string", "uniqueItems": True},
    "no contained item": {"type": "array", "contains": STRING, "minContains": 0},
    "bounds of nothing": {"type": "array", "minContains": 3, "maxContains": 4},
    "a condition without branches": {"type": "string", "if": {"minLength": 1}},
    "branches without a condition": {"type": "string", "then": False, "else": False},
    "a condition that holds": {"if": True, "then": STRING, "else": INTEGER},
    "a condition that does not hold": {"if": False, "then": STRING, "else": INTEGER},
    "branches without effect": {"type": "string", "if": {"minLength": 1}, "then": {}, "else": True},
    "as many properties as are required": requires("a", "b", type="object", minProperties=2),
    "fewer properties than there are": {
        "type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False,
        "maxProperties": 2},
    "a single alternative": {"type": "array", "anyOf": [{"minItems": 1}]},
    "a single alternative beside parts": {"allOf": [STRING], "anyOf": [{"minLength": 2}]},
    "a single alternative that the parts repeat": {
        "allOf": [{"$ref": "#/$defs/x"}], "anyOf": [{"$ref": "#/$defs/x"}], "$defs": TAGGED},
    "a single alternative whose value equals that of a part": {
        "allOf": [{"enum": [1, "a"]}], "anyOf": [{"enum": [True, "a"]}]},
    "a single alternative in an old draft": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"x": STRING}, "properties": {"a": {"anyOf": [{"$ref": "#/definitions/x"}]}},
        "type": "object", "additionalProperties": INTEGER},
    "a pointer": {"type": "string", "format": "json-pointer"},
    "a format of numbers": {"type": "integer", "format": "int32"},
    "an unknown format": {"type": "string", "format": "color"},
    "characters that answers do not have": {"enum": ["a\x7fb", "a", {"b": ["\x00"]}]},
    "an unknown dialect": {"$schema": "https://example.org/schema", "type": "string"},
    "a draft with another address": {
        "$schema": "https://json-schema.org/draft-07/schema", "type": "string"},
    "annotations": {"type": "string", "deprecated": True, "contentSchema": {"not": {}}},
    "a deprecated choice": {"oneOf": [INTEGER | {"deprecated": True}, STRING]},
}  # fmt: skip
REFUSED: dict[str, Any] = {
    "overlapping types": {"oneOf": [INTEGER, {"type": "number"}]},
    "touching ranges": {
        "oneOf": [{"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 1}]},
    "a value in two alternatives": {"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]},
    "an alternative within another": {
        "type": "object", "oneOf": [requires("a"), requires("a", "b")]},
    "texts and a text": {"oneOf": [STRING, {"const": "a"}]},
    "a narrower opposite": {"oneOf": [{"not": INTEGER}, {"type": "number"}]},
    "unresolved references": of({}, "a", "b"),
    "references of another document": {
        "oneOf": [{"$id": "https://example.org/a", "$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
        "$defs": TAGGED},
    "siblings of references in old drafts": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "oneOf": [{"$ref": "#/definitions/x", "type": "string"}, {"type": "integer"}],
        "definitions": {"x": {}}},
    "names of a list that nothing evaluates": {
        "propertyNames": {"enum": ["a"]}, "unevaluatedProperties": False},
    "items of an older draft": {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "items": [INTEGER], "unevaluatedItems": False},
    "a control character": {"type": "string", "pattern": "^a\\u0000b$"},
    "a named control character": {"type": "string", "pattern": "^a[\\x7f]b$"},
    "a control character in a name": {"patternProperties": {"^\x00": {}}, "type": "object"},
    "a value that cannot be written": {"const": "a\x00b"},
    "opposites of lengths": {"type": "string", "not": {"minLength": 1}},
    "five dependencies": {"dependentRequired": {str(n): ["a"] for n in range(5)}},
}  # fmt: skip


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


def valid(schema: Any, value: Any) -> bool:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(value))


@pytest.mark.process
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_rewritten_schema_allows_only_what_fits(walker: Walker, name: str) -> None:
    schema = ACCEPTED[name]
    allowed = [v for v in VALUES if walker.fits(schema, json.dumps(v))]
    fitting = [v for v in VALUES if valid(schema, v)]
    assert allowed, "the grammar allows something"
    assert all(value in fitting for value in allowed)
    for seed in range(3):
        text = walker.walk(schema, seed)
        assert text is None or valid(schema, json.loads(text)), text


@pytest.mark.process
@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_rewritten_is_refused(walker: Walker, name: str) -> None:
    with pytest.raises(InferdError, match="json-schema: #"):
        walker.fits(REFUSED[name], "1")


def test_an_alternative_that_the_parts_repeat_is_left_out() -> None:
    names = {"enum": [f"name-{n}" for n in range(100)]}
    repeated = {"allOf": [{"$ref": "#/$defs/x"}], "anyOf": [{"$ref": "#/$defs/x"}]}
    document = {"$defs": {"x": names}, "items": repeated}
    assert rewritten_schema(document)["items"] == {"allOf": [{"$ref": "#/$defs/x"}]}


def test_the_document_stays_as_it_was() -> None:
    for schema in (*ACCEPTED.values(), *REFUSED.values()):
        before = json.dumps(schema)
        rewritten_schema(schema)
        assert json.dumps(schema) == before


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["a", "b", "object", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=4,
)
KEYWORDS = (
    "oneOf", "anyOf", "allOf", "not", "if", "then", "else", "type", "enum", "const", "required",
    "properties", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
    "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "uniqueItems",
    "contains", "minContains", "maxContains", "items", "prefixItems", "maxItems", "format", "$ref",
    "$defs", "$id", "$schema", "unevaluatedProperties", "unevaluatedItems", "minimum", "maximum",
)  # fmt: skip
SCHEMAS = st.recursive(
    st.dictionaries(st.sampled_from(KEYWORDS), JSON, max_size=3),
    lambda inner: st.dictionaries(
        st.sampled_from(KEYWORDS),
        inner | st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
        max_size=4,
    ),
    max_leaves=8,
)


@settings(max_examples=repetitions(60), suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS, st.booleans())
def test_whatever_a_schema_contains_it_is_accepted_or_refused(schema: Any, lenient: bool) -> None:
    reply = check_grammar(CheckRequest(schema=json.dumps(schema), lenient=lenient))
    assert bool(reply.grammar) == (reply.refusal is None)
    assert lenient or not reply.dropped


PARTS = st.sampled_from(
    [
        True, False, INTEGER, STRING, OBJECT, {"type": "number"}, {"type": ["null", "array"]},
        {"const": 1}, {"enum": ["a", 1, None]}, {"maximum": 1}, {"minimum": 2, "type": "number"},
        {"maxLength": 1}, {"maxItems": 1, "uniqueItems": True}, {"prefixItems": [INTEGER]},
        requires("a"), requires("b"), requires("a", "b"), OBJECT | requires("b"),
        {"properties": {"a": INTEGER}}, {"properties": {"a": STRING, "b": {}}}, is_a("a", 1),
        OBJECT | is_a("a", "a") | requires("a"), OBJECT | is_a("a", 1) | requires("a"),
        {"additionalProperties": False}, {"maxProperties": 1}, {"minProperties": 1},
        {"propertyNames": {"enum": ["a", "c"]}}, {"propertyNames": {"pattern": "^[ab]"}},
        {"patternProperties": {"^a": INTEGER}}, {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedProperties": False}, {"unevaluatedItems": False}, {"$ref": "#/$defs/x"},
        {"$ref": "#/$defs/y"},
    ]
)  # fmt: skip


PLAIN = PARTS.filter(lambda part: not isinstance(part, dict) or "$ref" not in part)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    maps = inner.filter(lambda part: isinstance(part, dict))
    return (
        st.builds(lambda parts: {"oneOf": parts}, some)
        | st.builds(lambda parts: {"oneOf": parts}, some)
        | st.builds(lambda parts: {"anyOf": parts}, some)
        | st.builds(lambda parts: {"allOf": parts}, some)
        | st.builds(lambda part: {"not": part}, inner)
        | st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner)
        | st.builds(lambda part: {"dependentSchemas": {"a": part}}, inner)
        | st.builds(lambda part: {"properties": {"a": part}}, inner)
        | st.builds(lambda part: {"unevaluatedProperties": part}, inner)
        | st.builds(lambda a, b: a | b, maps, maps)
    )


@pytest.mark.process
@settings(
    max_examples=repetitions(60),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.recursive(PARTS, combined, max_leaves=6), PLAIN, PLAIN)
def test_no_combination_of_keywords_allows_what_does_not_fit(
    walker: Walker, schema: Any, x: Any, y: Any
) -> None:
    document = {"allOf": [schema], "$defs": {"x": x, "y": y}}
    try:
        allowed = [value for value in VALUES if walker.fits(document, json.dumps(value))]
    except InferdError:
        return
    for value in allowed:
        assert jsonschema.Draft202012Validator(document).is_valid(value), value

"""Keywords that a schema leaves out: types, and objects without further properties."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import jsonschema
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.grammars.json_schema.document import read_schema
from inferd.backends.grammars.json_schema.inference import infer_keywords
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker, TagRequest
from inferd.backends.params import SamplingParams
from inferd.backends.params.parameter_table import BY_NAME
from tests.backends.grammars.json_schema.schema_suite import groups_in
from tests.backends.walking import Walker, compiler_of, vocabulary
from tests.tiny_gguf import write_tiny
from tools.get_schemas import MISSING, suite

CITY: dict[str, Any] = {"type": "object", "properties": {"name": {}}, "required": ["name"]}
SIZE: dict[str, Any] = {"type": "object", "properties": {"size": {}}}
GOOD, BAD = {"name": "Rome"}, {"name": "Rome", "other": 1}
BOTH = {"name": "Rome", "size": 1}
DEFS: dict[str, Any] = {"$defs": {"City": CITY, "Size": SIZE}}
REF, SIZE_REF = {"$ref": "#/$defs/City"}, {"$ref": "#/$defs/Size"}
INTEGERS = {"items": {"type": "integer"}}
TREE = {"properties": {"children": {"items": {"$ref": "#/$defs/Tree"}}}}


def inferred(schema: Any, infer: str) -> Any:
    document = read_schema(json.dumps(schema))
    infer_keywords(document, infer)
    return document


def fits(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


CLOSED: list[tuple[dict[str, Any], Any, Any]] = [
    (CITY, GOOD, BAD),
    ({"properties": {"city": CITY}}, {"city": GOOD}, {"city": BAD}),
    ({"type": "array", "items": CITY}, [GOOD], [GOOD, BAD]),
    ({"prefixItems": [CITY]}, [GOOD], [BAD]),
    ({"additionalProperties": CITY}, {"a": GOOD}, {"a": BAD}),
    ({"anyOf": [CITY, {"type": "null"}]}, GOOD, BAD),
    ({"oneOf": [CITY, {"type": "null"}]}, GOOD, BAD),
    (REF | DEFS, GOOD, BAD),
    ({"anyOf": [REF, {"type": "null"}]} | DEFS, GOOD, BAD),
    ({"allOf": [REF], "description": "A city."} | DEFS, GOOD, BAD),
    ({**CITY, "title": "City", "nullable": True, "x-order": 1}, GOOD, BAD),
    ({"type": "object", "properties": {}}, {}, GOOD),
    ({"properties": {"not": CITY, "if": {}}}, {"not": GOOD}, {"not": BAD}),
    ({**CITY, "required": ["name", "size"]}, BOTH, {**BOTH, "other": 1}),
    ({**CITY, "dependentRequired": {"name": ["size"]}}, BOTH, {**BOTH, "other": 1}),
    ({**CITY, "patternProperties": {"^s": {}}}, BOTH, BAD),
    ({"type": "object", "patternProperties": {"^n": {}}}, GOOD, BAD),
    ({"allOf": [CITY, SIZE]}, BOTH, {**BOTH, "other": 1}),
    ({"allOf": [REF, SIZE]} | DEFS, BOTH, {**BOTH, "other": 1}),
    ({**CITY, "allOf": [{"anyOf": [SIZE_REF, {"required": ["x"]}]}]} | DEFS, BOTH, BAD),
    ({**CITY, "anyOf": [{"required": ["size"]}, {"required": ["x"]}]}, BOTH, BAD | BOTH),
    ({**REF, **SIZE, **DEFS}, BOTH, {**BOTH, "other": 1}),
    ({**CITY, "then": SIZE, "if": {}}, BOTH, {**BOTH, "other": 1}),
    ({**CITY, "dependentSchemas": {"name": SIZE}}, BOTH, {**BOTH, "other": 1}),
    ({**CITY, "not": {"required": ["x"]}}, GOOD, BAD),
    ({"allOf": [REF, SIZE], "unevaluatedProperties": False} | DEFS, BOTH, BAD | BOTH),
    # A definition with both uses.
    (
        {"properties": {"a": REF, "b": {"allOf": [REF, SIZE]}}} | DEFS,
        {"a": GOOD, "b": BOTH},
        {"a": BAD, "b": BOTH},
    ),
    (
        {"properties": {"a": REF, "b": {"allOf": [REF, SIZE]}}} | DEFS,
        {"a": GOOD, "b": BOTH},
        {"a": GOOD, "b": BAD},
    ),
    (
        {"$ref": "#/$defs/Tree", "$defs": {"Tree": TREE}},
        {"children": [{"children": []}]},
        {"children": [{"others": []}]},
    ),
]
"""Schemas that are closed, each with a value that then fits, and one that fits only before."""


@pytest.mark.parametrize(("schema", "good", "bad"), CLOSED)
def test_objects_have_only_the_properties_that_the_schema_names(
    schema: dict[str, Any], good: Any, bad: Any
) -> None:
    closed = inferred(schema, "closed")
    assert fits(closed, good) and not fits(closed, bad)
    assert fits(schema, good)
    assert closed == inferred(closed, "closed"), "a second time changes nothing"


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "required": ["name"]},
        {**CITY, "additionalProperties": True},
        {**CITY, "additionalProperties": {"type": "integer"}},
        {**CITY, "unevaluatedProperties": True},
        {**CITY, "unevaluatedProperties": {"type": "integer"}},
        {**CITY, "propertyNames": {"pattern": "^[a-z]"}},
        {**CITY, "minProperties": 2},
        {"type": "object", "allOf": [CITY, {"additionalProperties": {"type": "integer"}}]},
        {"type": "object", "allOf": [CITY, {"patternProperties": {"^s": {}}}]},
        {"type": "object", "allOf": [CITY, {"$ref": "https://example.org/city"}]},
        {"type": "object", "anyOf": [CITY | {"unevaluatedProperties": {}}, {"required": ["x"]}]},
        {"enum": [BAD], "properties": {"name": {}}},
        {"not": CITY},
        {"if": CITY, "then": {"required": ["size"]}},
        {"type": "object", "properties": {"a": {"$id": "https://example.org/a", **CITY}}},
    ],
)
def test_a_schema_that_may_allow_for_others_stays_open(schema: dict[str, Any]) -> None:
    assert inferred(schema, "closed") == read_schema(json.dumps(schema))


def test_a_property_that_two_schemas_describe_stays_open() -> None:
    """With both closed, the property would have no value."""
    parts = [{"properties": {"a": part}, "type": "object"} for part in (CITY, SIZE)]
    assert fits(inferred({"allOf": parts}, "closed"), {"a": BOTH})
    assert not fits(inferred({"allOf": parts}, "closed"), {"a": BOTH, "other": 1})


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (INTEGERS, "array"),
        (INTEGERS | {"minItems": 5}, "array"),
        ({"prefixItems": [{}]}, "array"),
        ({"items": True}, "array"),
        ({"properties": {"a": {}}}, "object"),
        ({"properties": {}, "required": ["a"]}, "object"),
        ({"additionalProperties": {"type": "integer"}}, "object"),
        ({"patternProperties": {"^a": {}}}, "object"),
        ({"pattern": "^a"}, "string"),
        ({"properties": {}, "items": {}}, ["object", "array"]),
        ({"allOf": [{"properties": {"a": {}}}, {"required": ["a"]}]}, "object"),
        ({"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "object"),
        ({"minItems": 5}, None),
        ({"required": ["a"]}, None),
        ({"minLength": 1, "minimum": 3}, None),
        (INTEGERS | {"enum": [1]}, None),
        (INTEGERS | {"const": 1}, None),
        (INTEGERS | {"anyOf": [{"type": "string"}, {"type": "array"}]}, None),
        (INTEGERS | {"oneOf": [{"enum": ["a"]}, {"type": "array"}]}, None),
        (INTEGERS | {"type": ["array", "null"]}, ["array", "null"]),
    ],
)
def test_a_type_is_inferred_from_keywords_about_it(schema: Any, kind: Any) -> None:
    for infer in ("types", "closed"):
        assert inferred(schema, infer).get("type") == kind
        nested = {"type": "object", "properties": {"x": schema}}
        assert inferred(nested, infer)["properties"]["x"].get("type") == kind
        listed = {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": schema}}
        assert inferred(listed, infer)["$defs"]["x"].get("type") == kind
    assert inferred(schema, "none").get("type") == schema.get("type")


@pytest.mark.parametrize(
    "schema",
    [
        {"if": INTEGERS, "then": {"properties": {"a": {}}}},
        {"not": INTEGERS},
        {"not": {"properties": {"a": INTEGERS}}},
        {"anyOf": [INTEGERS, {"properties": {"a": {}}}]},
        {"oneOf": [INTEGERS, {"type": "object", "properties": {"a": INTEGERS}}]},
        {"contains": INTEGERS},
        {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": INTEGERS}},
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"not": {"$ref": "#/$defs/x"}}},
            "$defs": {"x": INTEGERS},
        },
    ],
)
def test_operands_stay_as_they_are(schema: dict[str, Any]) -> None:
    assert inferred(schema, "types") == schema


def test_a_property_within_an_alternative_has_its_type() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {"a": INTEGERS}}, {"type": "null"}]}
    found = inferred(schema, "types")
    assert not fits(found, {"a": 1}) and fits(found, {"a": [1]}) and fits(found, None)


@pytest.mark.parametrize("infer", ["types", "closed"])
def test_each_value_of_a_schema_with_inferred_keywords_fits_the_schema(infer: str) -> None:
    """Among the instances of the official suite, in which `oneOf` has its closed alternatives."""
    folder = suite()
    assert folder is not None, MISSING
    fewer = 0
    for group in groups_in(folder):
        text = json.dumps(group["schema"])
        if not isinstance(group["schema"], dict) or 'Ref"' in text or '"$ref"' in text:
            continue
        if infer == "closed" and "oneOf" in text:
            continue
        found = inferred(group["schema"], infer)
        for test in group["tests"]:
            assert test["valid"] or not fits(found, test["data"]), (group, test)
            fewer += test["valid"] and not fits(found, test["data"])
    assert fewer > 20, "the keywords are inferred"


def texts(value: Any) -> Iterator[str]:
    """Yield the texts of *value*, with the properties of an object in each order."""
    orders = permutations(value.items()) if isinstance(value, dict) else ()
    yield from map(json.dumps, map(dict, orders) if isinstance(value, dict) else [value])


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


@pytest.mark.process
def test_the_grammar_of_a_closed_schema_has_no_other_properties(walker: Walker) -> None:
    refused = 0
    for schema, good, bad in CLOSED:
        try:
            assert any(walker.fits(schema, t, schema_infer="closed") for t in texts(good)), schema
        except InvalidArgument:
            refused += 1
            continue
        assert not any(walker.fits(schema, t, schema_infer="closed") for t in texts(bad)), schema
        for seed in range(2):
            text = walker.walk(schema, seed, schema_infer="closed")
            assert text is None or fits(schema, json.loads(text)), (schema, text)
    assert refused <= 1, "only a negation is not supported"


@pytest.mark.process
def test_answers_follow_the_inferred_keywords(walker: Walker) -> None:
    list_texts = ("[1, 2]", "1", '"a"', "{}")
    allowed = {
        infer: [text for text in list_texts if walker.fits(INTEGERS, text, schema_infer=infer)]
        for infer in ("none", "types")
    }
    assert allowed == {"none": list(list_texts), "types": ["[1, 2]"]}
    assert walker.fits(CITY, json.dumps(BAD), schema_infer="types")
    assert walker.fits(CITY, json.dumps(GOOD), schema_infer="closed")
    for schema, text in ((INTEGERS, "1"), (CITY, json.dumps(BAD))):
        assert not walker.fits(schema, text, schema_infer=BY_NAME["schema-infer"].default)
    assert SamplingParams().schema_infer == BY_NAME["schema-infer"].default == "closed"


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.mark.process
def test_schemas_within_other_formats_have_the_inferred_keywords(checker: GrammarChecker) -> None:
    tag = TagRequest(trigger=("<",), rest=(), end=(">",), schema=json.dumps(CITY))
    lark = f"start: %json {json.dumps(CITY)}"
    for infer in ("closed", "types"):
        for request in (
            CheckRequest(tags=(tag,), infer=infer),
            CheckRequest(lark=lark, infer=infer),
        ):
            grammar = checker.check(request).grammar.replace(" ", "")
            assert ('"additionalProperties":false' in grammar) == (infer == "closed")


@pytest.mark.process
def test_a_long_chain_of_parts_does_not_end_the_process(checker: GrammarChecker) -> None:
    count = 700
    parts: dict[str, Any] = {
        str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}, {"properties": {f"p{n}": {}}}]}
        for n in range(count)
    }
    schema = {"$ref": "#/$defs/0", "$defs": parts | {str(count): CITY}}
    checker.check(CheckRequest(schema="{}"))
    sandbox = checker._sandbox
    with pytest.raises(InvalidArgument, match="too deep"):
        checker.check(CheckRequest(schema=json.dumps(schema), infer="closed"))
    assert checker._sandbox is sandbox

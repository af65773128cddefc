"""`schema-lenient`: constraints that no grammar keeps are left out and reported, within bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.grammars.json_schema.refusals import DROPPED_MAX
from inferd.backends.grammars.trial import CheckRequest, GrammarChecker
from inferd.backends.params.json_texts import PATH_CHARACTERS_MAX, SCHEMA_BYTES_MAX
from tests.backends.llama.schemas import REFUSED, SCHEMAS
from tests.backends.walking import Walker, compiler_of, vocabulary
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process
UNIQUE = {"type": "array", "uniqueItems": True}
INTEGER, STRING = {"type": "integer"}, {"type": "string"}
LEFT_OUT: dict[str, tuple[Any, list[str]]] = {
    "one": ({"items": UNIQUE}, ["#/items/uniqueItems"]),
    "several": (
        {"properties": {"a/b": UNIQUE, "c": {"not": {"minLength": 1}}}},
        ["#/properties/a~1b/uniqueItems", "#/properties/c/not"],
    ),
    "within another": ({"not": {"minLength": 1, "contains": {"uniqueItems": True}}}, ["#/not"]),
    "a condition": (
        {"if": {"contains": {}}, "then": {"not": {"minLength": 1}}, "else": UNIQUE},
        ["#/if"],
    ),
    "alternatives": ({"oneOf": [INTEGER, {"type": "number"}]}, ["#/oneOf"]),
    "of alternatives": (
        {"oneOf": [STRING, {"type": "string", "pattern": "(?=a)"}]},
        ["#/oneOf", "#/oneOf/1/pattern"],
    ),
    "of alternatives of alternatives": (
        {"allOf": [True], "oneOf": [STRING, {"oneOf": [STRING, STRING | {"pattern": "(?=a)"}]}]},
        ["#/oneOf/1/oneOf", "#/oneOf", "#/oneOf/1/oneOf/1/pattern"],
    ),
    "a format": ({"type": "string", "format": "regex"}, ["#/format"]),
    "a pattern": ({"type": "string", "pattern": "(?=a)b"}, ["#/pattern"]),
    "a reference": (
        {"properties": {"a": {"$ref": "https://example.org/a"}}},
        ["#/properties/a/$ref"],
    ),
    "what is referred to": (
        {"$ref": "#/$defs/a", "$defs": {"a": UNIQUE, "b": {"not": {}}}},
        ["#/$defs/a/uniqueItems"],
    ),
    "a contradiction": ({"type": "integer", "minimum": 3, "maximum": 2}, ["#/minimum"]),
}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


def left_out(checker: GrammarChecker, schema: Any) -> list[str]:
    request = CheckRequest(schema=json.dumps(schema), lenient=True, infer="none")
    return checker.check(request).dropped


@pytest.mark.parametrize("name", LEFT_OUT)
def test_only_the_constraints_that_are_refused_are_left_out(
    checker: GrammarChecker, name: str
) -> None:
    schema, paths = LEFT_OUT[name]
    with pytest.raises(InvalidArgument):
        checker.check(CheckRequest(schema=json.dumps(schema)))
    assert left_out(checker, schema) == paths


def test_nothing_is_left_out_of_a_schema_that_is_accepted(checker: GrammarChecker) -> None:
    for name in [name for name in SCHEMAS if name.endswith(("-0", "-5"))]:
        assert left_out(checker, SCHEMAS[name]) == [], name


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=[json.dumps(s)[:60] for s, _ in REFUSED])
def test_each_refused_schema_is_accepted_or_has_no_values(
    checker: GrammarChecker, schema: Any, path: str
) -> None:
    if path == "#":
        with pytest.raises(InvalidArgument, match="levels"):
            left_out(checker, schema)
    else:
        assert left_out(checker, schema)


def test_the_other_constraints_are_kept_in_their_order(walker: Walker) -> None:
    schema = {
        "type": "object",
        "not": {"minProperties": 9},
        "properties": {"b": INTEGER, "a": UNIQUE | {"items": INTEGER}},
        "required": ["a", "b"],
    }
    texts = ('{"b": 1, "a": [1, 1]}', '{"a": [], "b": 1}', '{"b": 1, "a": ["x"]}', '{"b": 1}')
    fitting = [text for text in texts if walker.fits(schema, text, schema_lenient=True)]
    assert fitting == ['{"b": 1, "a": [1, 1]}']


def test_as_many_constraints_as_the_bound_are_left_out_and_one_more_is_refused(
    checker: GrammarChecker,
) -> None:
    schema = {"prefixItems": [UNIQUE] * DROPPED_MAX}
    assert len(left_out(checker, schema)) == DROPPED_MAX
    with pytest.raises(InvalidArgument, match=f"{DROPPED_MAX} other constraints") as caught:
        left_out(checker, {"prefixItems": [UNIQUE] * (DROPPED_MAX + 1)})
    assert caught.value.data == {"path": f"#/prefixItems/{DROPPED_MAX}/uniqueItems"}


def test_a_long_path_is_cut(checker: GrammarChecker) -> None:
    [path] = left_out(checker, {"properties": {"n" * 1000: UNIQUE}})
    assert len(path) == PATH_CHARACTERS_MAX


def test_false_has_no_constraint_to_leave_out(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidArgument, match="no value fits it"):
        left_out(checker, False)


def test_true_is_any_value(walker: Walker) -> None:
    assert walker.fits(True, "3") and walker.fits(True, '{"a": [null]}')
    assert not walker.fits({}, "3"), "as in llama-server"


@pytest.mark.parametrize("lenient", [False, True])
def test_a_large_schema_of_refused_keywords_does_not_end_the_process(
    checker: GrammarChecker, lenient: bool
) -> None:
    """The search for them takes less CPU time than the process may."""
    values = {f"{n:04}": {"type": "string", "pattern": "(?=a)", "maxLength": n} for n in range(900)}
    text = json.dumps({"type": "object", "properties": values})
    assert len(text) > 0.9 * SCHEMA_BYTES_MAX
    left_out(checker, True)
    sandbox = checker._sandbox
    with pytest.raises(InvalidArgument, match="json-schema: #"):
        checker.check(CheckRequest(schema=text, lenient=lenient))
    assert checker._sandbox is sandbox

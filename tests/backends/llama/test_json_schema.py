"""The grammar of a JSON schema allows only texts that fit; other schemas are refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from inferd.backends import Model, ModelSpec, SamplingParams, load_model
from inferd.backends.errors import InvalidArgument
from inferd.backends.llama.json_schema import SCHEMA_BYTES_MAX, gbnf_of
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from tests.backends.llama.schemas import PATTERNS, REFUSED, SCHEMAS
from tests.backends.walking import Walker, vocabulary
from tests.models import smollm2
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny

ENDED_MIN = 0.9
"""Share of the walks that end; the others were still in a large part, such as a tree."""


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    """Return a walker by tokens of one byte."""
    with vocabulary(write_tiny("llama", tmp_path_factory.mktemp("tiny"))) as vocab:
        yield Walker(vocab)


@pytest.fixture(scope="module")
def real() -> Iterator[Walker]:
    """Return a walker by SmolLM2's tokens, some of which end a text and begin the next value."""
    with vocabulary(smollm2()) as vocab:
        yield Walker(vocab)


def check(text: str, schema: Any) -> None:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker = validator.FORMAT_CHECKER
    validator(schema, format_checker=checker).validate(json.loads(text))


def older(schema: Any) -> bool:
    return "additionalItems" in schema or isinstance(schema.get("items"), list)


def test_there_are_200_different_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS.values()}) == len(SCHEMAS) >= 200


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_that_the_grammar_allows_fit_the_schema(
    bytewise: Walker, real: Walker, name: str
) -> None:
    schema = SCHEMAS[name]
    texts = [bytewise.walk(schema, seed) for seed in range(3)] + [real.walk(schema, 7)]
    whole = [text for text in texts if text is not None]
    assert whole, "none of four walks ended"
    for text in whole:
        draft = jsonschema.Draft7Validator if older(schema) else jsonschema.Draft202012Validator
        draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize(("schema", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_a_schema_that_a_grammar_cannot_express_is_refused_with_path_and_hint(
    schema: Any, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        gbnf_of(json.dumps(schema))
    assert caught.value.message.startswith("json-schema: #") and caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"a"', "nul", '{"a": NaN}'])
def test_an_invalid_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="json-schema: ") as caught:
        gbnf_of(text)
    assert caught.value.hint


def test_a_schema_of_the_largest_size_is_accepted_and_one_more_byte_is_refused() -> None:
    schema = {"title": ""}
    schema["title"] = "x" * (SCHEMA_BYTES_MAX - len(json.dumps(schema)))
    gbnf_of(json.dumps(schema))
    with pytest.raises(InvalidArgument, match="bytes"):
        gbnf_of(json.dumps(schema) + " ")


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("most", "make"),
    [
        (64, _deep),
        (256, lambda n: {"properties": {f"p{i}": {"type": "null"} for i in range(n)}}),
        (1000, lambda n: {"type": "array", "items": {"type": "null"}, "maxItems": n}),
        (10_000, lambda n: {"type": "string", "minLength": n}),
        (2000, lambda n: {"type": "string", "pattern": "a" * n}),
        (256, lambda n: {"anyOf": [{"const": i} for i in range(n)]}),
    ],
    ids=["levels", "properties", "items", "length", "pattern", "alternatives"],
)
def test_bounds_are_reached_and_not_passed(most: int, make: Callable[[int], Any]) -> None:
    gbnf_of(json.dumps(make(most)))
    with pytest.raises(InvalidArgument, match=r"more than|at most|deeper than"):
        gbnf_of(json.dumps(make(most + 1)))


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "multipleOf"])
def test_a_number_beyond_all_doubles_is_refused(keyword: str) -> None:
    with pytest.raises(InvalidArgument, match=f"#/{keyword}"):
        gbnf_of(json.dumps({"type": "integer", keyword: 10**400}))


def test_one_of_accepts_many_values_and_refuses_too_many_schemas() -> None:
    """Each is compared with all others; values are compared by a lookup."""
    values = [{"const": i} for i in range(2000)]
    assert '"1999"' in gbnf_of(json.dumps({"oneOf": values}))
    with pytest.raises(InvalidArgument, match="#/oneOf/7"):
        gbnf_of(json.dumps({"oneOf": [*values, {"enum": ["a", 7.0]}]}))
    objects = [{"type": "object", "required": [f"p{i}"]} for i in range(200)]
    with pytest.raises(InvalidArgument, match="more than 30000"):
        gbnf_of(json.dumps({"oneOf": [dict(one, additionalProperties=False) for one in objects]}))


def test_one_of_considers_the_other_keywords() -> None:
    some = {"enum": [1, 2], "oneOf": [{"enum": [1, 3]}, {"enum": [2, 3]}]}
    assert "3" not in gbnf_of(json.dumps(some)).partition("root")[2].splitlines()[0]


def test_an_endlessly_nested_schema_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="json-schema: "):
        gbnf_of('{"not":' * 5000 + "{}" + "}" * 5000)
    with pytest.raises(InvalidArgument, match="json-schema: "):
        gbnf_of('{"allOf":[' * 2000 + "{}" + "]}" * 2000)


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (0, 9), (1, 12), (5, 105), (-5, 5), (-120, -7), (-99, 100), (10, 99), (19, 121),
     (None, -3), (None, 0), (None, 17), (-12, None), (0, None), (1, None), (99, None)],
)  # fmt: skip
def test_an_integer_is_allowed_only_between_its_bounds(
    bytewise: Walker, low: int | None, high: int | None
) -> None:
    bounds = {"minimum": low, "maximum": high}
    schema = {"type": "integer"} | {k: v for k, v in bounds.items() if v is not None}
    for number in range(-130, 131):
        fits = (low is None or low <= number) and (high is None or number <= high)
        assert bytewise.fits(schema, str(number)) is fits, number
    assert not bytewise.fits(schema, "007") and not bytewise.fits(schema, "1.0")


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-1, 1), (0.25, 0.75), (0.5, 3.7), (-2.5, -0.001), (1, 2.125)]
)
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_number_is_allowed_only_between_its_bounds(
    bytewise: Walker, low: float, high: float, exclusive: bool
) -> None:
    names = ("exclusiveMinimum", "exclusiveMaximum") if exclusive else ("minimum", "maximum")
    schema = {"type": "number", **dict(zip(names, (low, high), strict=True))}
    for thousandths in range(-2600, 3800, 7 if high > 3 else 1):
        text = f"{thousandths / 1000:.3f}"
        if float(text) not in (low, high, 0.0):
            assert bytewise.fits(schema, text) is (low < float(text) < high), text
    for text in (str(low), str(high), f"{low}0", f"{high}0", "0", "-0.0", "1", "1.0", "-1", "2"):
        value = float(text)
        fits = low < value < high if exclusive else low <= value <= high
        assert fits or not bytewise.fits(schema, text), text
    assert exclusive or (bytewise.fits(schema, str(low)) and bytewise.fits(schema, str(high)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_text_is_allowed_only_if_its_pattern_matches(bytewise: Walker, pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    sought = re.compile(pattern.replace("(?<", "(?P<"))
    for length in range(4):
        for letters in itertools.product('aby1-#"\\ ]', repeat=length):
            text = "".join(letters)
            fits = bytewise.fits(schema, json.dumps(text))
            assert fits is (sought.search(text) is not None), text


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 0), (0, 1), (3, 5), (0, 63), (0, 64), (64, 64), (65, 65), (2, 70), (100, 250)],
)
def test_texts_and_lists_are_as_long_as_they_may_be(bytewise: Walker, low: int, high: int) -> None:
    text = {"type": "string", "minLength": low, "maxLength": high}
    items = {"type": "array", "items": {"const": 1}, "minItems": low, "maxItems": high}
    for length in {
        *range(6),
        *range(60, 72),
        low - 1,
        low,
        low + 1,
        high - 1,
        high,
        high + 1,
        127,
        128,
    }:
        if length >= 0:
            fits = low <= length <= high
            assert bytewise.fits(text, json.dumps("a" * length)) is fits, length
            assert bytewise.fits(items, json.dumps([1] * length)) is fits, length


@pytest.mark.parametrize("required", [[], ["a"], ["b"], ["c"], ["a", "c"], ["a", "b", "c"]])
@pytest.mark.parametrize("least", [0, 1])
def test_required_properties_are_present_and_others_are_optional(
    bytewise: Walker, required: list[str], least: int
) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in "abc"},
        "required": required,
        "minProperties": least,
    }
    for names in itertools.chain(*(itertools.permutations("abc", n) for n in range(4))):
        text = json.dumps(dict.fromkeys(names))
        fits = set(required) <= set(names) and len(names) >= least and list(names) == sorted(names)
        assert bytewise.fits(schema, text) is fits, text
    assert not bytewise.fits(schema, '{"a": null, "a": null, "b": null, "c": null}')


def test_a_named_property_cannot_recur_as_an_additional_one(bytewise: Walker) -> None:
    named = {name: {"type": "integer"} for name in ("ab", "abc", "b", 'q"', "")}
    schema = {"type": "object", "properties": named, "additionalProperties": {"type": "null"}}
    for name in ("ab", "abc", "b", 'q"', "\\u0061b", ""):
        assert not bytewise.fits(schema, f'{{"{name}": null}}'), name
    for name in ("a", "abd", "abcd", "ba", "x", "é", "q"):
        assert bytewise.fits(schema, f'{{"{name}": null}}'), name
        assert bytewise.fits(schema, f'{{"b": 3, "{name}": null}}'), name
    assert bytewise.fits(schema, '{"q\\"": 1, "": 2, "x": null}')


def test_layouts_of_all_kinds_are_allowed(bytewise: Walker) -> None:
    schema = SCHEMAS["used-0"]
    value = {"name": "get_time", "arguments": {"city": "Rom", "unit": "celsius"}}
    for indent, separators in ((None, None), (None, (",", ":")), (2, None), (4, None)):
        assert bytewise.fits(schema, json.dumps(value, indent=indent, separators=separators))


@pytest.mark.model
@pytest.mark.parametrize("temp", [0.0, 2.0])
def test_answers_of_a_real_model_fit_the_schema(llama: Model, temp: float) -> None:
    engine = Engine(llama)
    prompt = llama.tokenize(b"Describe Rome in JSON:\n", special=False, bos=True)
    ended = 0
    for number, name in enumerate(n for n in SCHEMAS if n.endswith("-1") or n.startswith("used")):
        sampling = SamplingParams(json_schema=json.dumps(SCHEMAS[name]), temp=temp, seed=number)
        text, stats = _answer(engine, prompt, sampling)
        if stats.stop_reason == "eos":
            ended += 1
            check(text, SCHEMAS[name])
        else:
            assert stats.stop_reason == "length", name
    assert ended >= 8, "most answers end within their tokens"


def _answer(engine: Engine, prompt: list[int], sampling: SamplingParams) -> tuple[str, m.TurnStats]:
    spec = m.TaskSpec(id=1, owner=1, tokens=m.pack_tokens(prompt), sampling=sampling, n_predict=120)
    reports = iterate_engine(engine, [m.Submit(spec)])
    while not isinstance(reports[-1], m.Finished | m.Failed):
        reports += iterate_engine(engine, [])
    end = reports[-1]
    assert isinstance(end, m.Finished), end
    text = b"".join(r.text for r in reports if isinstance(r, m.Tokens))
    return (text + end.text).decode(), end.stats


def test_names_of_special_tokens_are_not_text_that_fits(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """llama.cpp accepts `<s>` as the letters of its name, but an answer does not show it."""
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=1, ctx_size=256, threads=1)
    model = load_model(spec, lambda _: True)
    start = model.tokenize(b"", special=False, bos=True)[0]
    assert model.piece(start) == b"<s>" and model.is_control(start)
    for temp in (0.0, 1.0):
        sampling = SamplingParams(
            json_schema='{"const": "<s>"}', temp=temp, logit_bias=((start, 1000.0),)
        )
        assert _answer(Engine(model), [1, 9], sampling)[0] == '"<s>"', "letter by letter"
    model.close()


def test_an_unsupported_schema_fails_the_turn_with_its_path(llama: Model) -> None:
    engine = Engine(llama)
    sampling = SamplingParams(json_schema='{"properties": {"a": {"not": {}}}}')
    spec = m.TaskSpec(id=1, owner=1, tokens=m.pack_tokens([1, 2]), sampling=sampling)
    reports = iterate_engine(engine, [m.Submit(spec)])
    assert isinstance(reports[-1], m.Failed)
    assert reports[-1].error["name"] == "InvalidArgument"
    assert reports[-1].error["data"] == {"path": "#/properties/a/not"}

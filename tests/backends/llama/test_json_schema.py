"""The grammar of a JSON schema allows only texts that fit; other schemas are refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from inferd.backends import LanguageModel, ModelSpec, SamplingParams
from inferd.backends.errors import InvalidArgument, TooLarge
from inferd.backends.grammars.json_schema.schema_grammar import WHITESPACE_MAX
from inferd.backends.grammars.trial import CheckReply, CheckRequest, GrammarChecker
from inferd.backends.params.json_texts import SCHEMA_BYTES_MAX
from inferd.backends.params.parameter_table import JSON_LAYOUTS
from inferd.scheduler import messages as m
from inferd.scheduler.engine.engine import Engine
from inferd.scheduler.owner import Owner
from tests.backends.driving import load_language_model
from tests.backends.llama.schemas import PATTERNS, REFUSED, SCHEMAS
from tests.backends.walking import Walker, compiler_of, vocabulary
from tests.models import smollm2
from tests.scheduler.doubles import iterate_engine
from tests.tiny_gguf import write_tiny

pytestmark = pytest.mark.process  # the trial of grammars

ENDED_MIN = 0.9
"""Share of the walks that end; the others were still in a large part, such as a tree."""


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    """Return a walker by tokens of one byte."""
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with vocabulary(path) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


@pytest.fixture(scope="module")
def real() -> Iterator[Walker]:
    """Return a walker by SmolLM2's tokens, some of which end a text and begin the next value."""
    with vocabulary(smollm2()) as vocab, compiler_of(vocab) as compiler:
        yield Walker(vocab, compiler)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    checker.close()


def check_schema(checker: GrammarChecker, schema: Any) -> CheckReply:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return checker.check(CheckRequest(schema=text, infer="none"))


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
    texts += [bytewise.walk(schema, 4, schema_infer="closed")]
    whole = [text for text in texts if text is not None]
    assert whole, "none of five walks ended"
    for text in whole:
        draft = jsonschema.Draft7Validator if older(schema) else jsonschema.Draft202012Validator
        draft(schema, format_checker=draft.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize(("schema", "path"), REFUSED, ids=[json.dumps(s)[:60] for s, _ in REFUSED])
def test_a_schema_that_is_not_supported_is_refused_with_path_and_hint(
    checker: GrammarChecker, schema: Any, path: str
) -> None:
    with pytest.raises(InvalidArgument, match=r"^json-schema: #") as caught:
        check_schema(checker, schema)
    assert caught.value.data == {"path": path} and caught.value.hint


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"a"', "nul", '{"a": NaN}', "false"])
def test_an_invalid_schema_is_refused(checker: GrammarChecker, text: str) -> None:
    with pytest.raises(InvalidArgument, match="json-schema: ") as caught:
        checker.check(CheckRequest(schema=text))
    assert caught.value.hint


def test_a_schema_of_the_largest_size_is_accepted_and_one_more_byte_is_refused(
    checker: GrammarChecker,
) -> None:
    schema = {"title": ""}
    schema["title"] = "x" * (SCHEMA_BYTES_MAX - len(json.dumps(schema)))
    check_schema(checker, schema)
    with pytest.raises(TooLarge, match="bytes"):
        check_schema(checker, json.dumps(schema) + " ")


@pytest.mark.parametrize("schema", [{"x-guidance": {"whitespace_flexible": True}}, {"title": "a"}])
def test_a_schema_sets_no_options_of_the_compiler(bytewise: Walker, schema: Any) -> None:
    schema |= {"properties": {"a": {"type": "null"}}}
    assert bytewise.fits(schema, '{"a": null}') and not bytewise.fits(schema, '{"a" :  null}')


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "multipleOf"])
def test_a_number_beyond_all_doubles_is_refused(checker: GrammarChecker, keyword: str) -> None:
    with pytest.raises(InvalidArgument, match="json-schema: "):
        check_schema(checker, {"type": "integer", keyword: 10**400})


def test_an_endlessly_nested_schema_is_refused(checker: GrammarChecker) -> None:
    with pytest.raises(InvalidArgument, match="json-schema: "):
        check_schema(checker, '{"not":' * 5000 + "{}" + "}" * 5000)
    with pytest.raises(InvalidArgument, match="json-schema: "):
        check_schema(checker, '{"allOf":[' * 2000 + "{}" + "]}" * 2000)


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
        value = thousandths / 1000
        if value not in (low, high, 0.0):
            # Some digits may be required, or may be too many.
            forms = {str(value), f"{value:.2f}", f"{value:.3f}"} if value else set()
            same = [form for form in forms if float(form) == value]
            assert any(bytewise.fits(schema, t) for t in same) is (low < value < high), value
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
def test_required_properties_are_present_and_others_are_optional(
    bytewise: Walker, required: list[str]
) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in "abc"},
        "required": required,
    }
    for names in itertools.chain(*(itertools.permutations("abc", n) for n in range(4))):
        text = json.dumps(dict.fromkeys(names))
        fits = set(required) <= set(names) and list(names) == sorted(names)
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


@pytest.mark.parametrize("whitespace", JSON_LAYOUTS)
def test_white_space_is_as_chosen(bytewise: Walker, whitespace: str) -> None:
    schema = SCHEMAS["used-0"] | {"x-guidance": {"whitespace_flexible": True}}
    value = {"name": "get_time", "arguments": {"city": "Rom", "unit": "celsius"}}
    spaced, compact = json.dumps(value), json.dumps(value, separators=(",", ":"))
    fitting = {
        layout
        for layout, text in {
            "spaced": spaced, "compact": compact, "indented": json.dumps(value, indent="\t\r "),
            "mixed": spaced.replace(", ", ","),
            "wide": spaced.replace(", ", "," + " " * WHITESPACE_MAX),
        }.items()
        if bytewise.fits(schema, text, json_whitespace=whitespace)
    }  # fmt: skip
    everything = {"spaced", "compact", "indented", "mixed", "wide"}
    assert fitting == (everything if whitespace == "any" else {whitespace})


def test_any_white_space_has_a_bound_and_surrounds_no_value(bytewise: Walker) -> None:
    for text in (
        "[1," + " " * (WHITESPACE_MAX + 1) + "2]",
        " [1]",
        "[1] ",
        "[1,\v2]",
        "[1,\u00a02]",
    ):
        assert not bytewise.fits({"type": "array"}, text, json_whitespace="any"), text


def test_white_space_in_texts_is_free(bytewise: Walker) -> None:
    for whitespace in JSON_LAYOUTS:
        assert bytewise.fits({"type": "string"}, '" a,  b: "', json_whitespace=whitespace)


@pytest.mark.model
def test_answers_of_a_real_model_fit_the_schema(whole_smollm2: LanguageModel) -> None:
    prompt = whole_smollm2.tokenize(b"Describe Rome in JSON:\n", special=False, bos=True)
    names = [name for name in SCHEMAS if name.endswith("-1") or name.startswith("used")]
    samplings = [
        SamplingParams(json_schema=json.dumps(SCHEMAS[name]), temp=number % 2 * 2.0, seed=number)
        for number, name in enumerate(names)
    ]
    ended = 0
    for name, (text, stats) in zip(
        names, _answers(Engine(whole_smollm2), prompt, *samplings), strict=True
    ):
        if stats.stop_reason == "eos":
            ended += 1
            check(text, SCHEMAS[name])
        else:
            assert stats.stop_reason == "length", name
    assert ended >= 8, "most answers end within their tokens"


def _answers(
    engine: Engine, prompt: list[int], *samplings: SamplingParams
) -> list[tuple[str, m.TurnStats]]:
    """Return the text and the statistics of each answer; those in the slots share batches."""
    texts, ends = [b""] * len(samplings), dict[int, m.Finished]()
    commands: list[m.Command] = [
        m.Submit(
            m.TaskSpec(
                id=number,
                owner=Owner(1),
                tokens=m.pack_tokens(prompt),
                sampling=sampling,
                n_predict=120,
            )
        )
        for number, sampling in enumerate(samplings, 1)
    ]
    while len(ends) < len(samplings):
        for report in iterate_engine(engine, commands):
            assert not isinstance(report, m.Failed), report
            if isinstance(report, m.Tokens):
                texts[report.task_id - 1] += report.text
            elif isinstance(report, m.Finished):
                ends[report.task_id] = report
        commands = []
    return [
        ((text + ends[number].text).decode(), ends[number].stats)
        for number, text in enumerate(texts, 1)
    ]


def test_names_of_special_tokens_are_not_text_that_fits(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """llama.cpp accepts `<s>` as the letters of its name, but an answer does not show it."""
    path = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = ModelSpec(name="tiny", path=str(path), slots=1, ctx_size=256, threads=1)
    model = load_language_model(spec)
    start = model.tokenize(b"", special=False, bos=True)[0]
    assert model.piece(start) == b"<s>" and model.is_control(start)
    for temp in (0.0, 1.0):
        sampling = SamplingParams(
            json_schema='{"const": "<s>"}', temp=temp, logit_bias=((start, 1000.0),)
        )
        [(text, _)] = _answers(Engine(model), [1, 9], sampling)
        assert text == '"<s>"', "letter by letter"
    model.close()


def test_an_unsupported_schema_fails_the_turn_with_its_path(llama: LanguageModel) -> None:
    engine = Engine(llama)
    sampling = SamplingParams(json_schema='{"properties": {"a": {"not": {}}}}')
    spec = m.TaskSpec(id=1, owner=Owner(1), tokens=m.pack_tokens([1, 2]), sampling=sampling)
    reports = iterate_engine(engine, [m.Submit(spec)])
    assert isinstance(reports[-1], m.Failed)
    assert reports[-1].error["name"] == "InvalidArgument"
    assert reports[-1].error["data"] == {"path": "#/properties/a/not"}

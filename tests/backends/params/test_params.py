"""Parameters are read at, inside and outside their limits, in every spelling and form."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument, InvalidEncoding, UnsupportedOperation
from inferd.backends.params import (
    IGNORED_KEYS,
    PARAMETERS,
    REFUSED_KEYS,
    SAMPLERS,
    Parameter,
    adjust_parameters,
    parse_json_options,
    read_options,
    reasoning_budget,
    sampling_params,
)
from inferd.backends.params.parameter_table import EFFORTS

NUMBERS = [p for p in PARAMETERS if p.kind in ("int", "float")]
GOOD: dict[str, list[tuple[Any, Any]]] = {
    "efforts": [({}, EFFORTS), ({"low": -1, "none": 3.0}, EFFORTS | {"low": -1, "none": 3})],
    "text": [("", ""), ("a" * 65536, "a" * 65536)],
    "bool": [(True, True), (False, False)],
    "texts": [("a", ["a"]), (["a", "b"], ["a", "b"]), ([], []), (["", "a"], ["a"])],
    "samplers": [
        ("kpt", ["top-k", "top-p", "temperature"]),
        ("top_k;temperature", ["top-k", "temperature"]),
        (["typical_p", "TopK", "min_p"], ["typ-p", "top-k", "min-p"]),
        ("", []),
        ([], []),
    ],
    "biases": [
        ([[5, 1.5], ["yes", False]], [[5, 1.5], ["yes", False]]),
        ({"5": -2, "yes": 1}, [[5, -2.0], ["yes", 1.0]]),
        ([], []),
    ],
    "shares": [("3,2", [3, 2]), ("3/1.5", [3, 1.5]), ([1, 0], [1, 0]), ("", []), ([], [])],
    "tokens": [(7, [7]), ([0, (1 << 31) - 1], [0, (1 << 31) - 1]), ([], [])],
    "triggers": [("a", [["word", "a"]]), ([["token", 5]], [["token", 5]]), ([], [])],
    "schema": [({"a": [1]}, '{"a":[1]}'), (' {"a": 1}\n', '{"a": 1}'), (True, "true"), ("", "")],
    "scales": [
        ({"style": 0.7, "tone": -1}, [["style", 0.7], ["tone", -1.0]]),
        (["style", ["tone", 0.5]], [["style", 1.0], ["tone", 0.5]]),
        ([{"id": 0, "scale": 0.5}, {"name": "tone"}], [[0, 0.5], ["tone", 1.0]]),
        ("style", [["style", 1.0]]),
        ({"style": 100}, [["style", 100.0]]),
        ({}, []),
        ([], []),
    ],
}
BAD: dict[str, list[Any]] = {
    "tokens": ["1", True, 1.5, [-1], [1 << 31], {}, [[1]], [1] * 10_001],
    "triggers": [7, [7], [""], [["word"]], ["a"] * 513],
    "int": ["1", True, 1.5, [], {}],
    "float": ["1", False, [], {}],
    "bool": [1, "true", []],
    "text": [1, ["a"], "a" * 65537, "a\0b"],
    "texts": [1, [1], {}, ["a"] * 10_001],
    "schema": [1, [], "{", "[]", "nul", "[" * 10_000],
    "samplers": [["top_k", "top_k"], ["nobody"], "kk", "zz", 7, [7]],
    "biases": [
        [5],
        [[5]],
        [[True, 1]],
        [["", 1]],
        [[5, True]],
        [[5, "1"]],
        [[5, 1e7]],
        "5",
        {"5": None},
    ],
    "scales": [
        7,
        [7],
        [[7]],
        [["style", 1], ["style", 2]],
        [{"scale": 1}],
        [{"id": -1}],
        [[True, 1]],
        {"": 1},
        {"style": "1"},
        {"style": True},
        {"style": 100.1},
        {"style": -101},
        [["style", math.nan]],
        [["style", math.inf]],
        [f"n{i}" for i in range(65)],
    ],
    "shares": [
        *("a,b", "1,,2", [1, None], [True], [[1]], {}, {"a": 1}, 3, 0, False),
        *([-1, 2], [math.nan], [2e6], [10**400], [0, 0], [1] * 17),
    ],
    "structural-tag": [1, [], "{", "[]", {}, {"structures": []}, [10**400], "\ud800"],
    "choice": ["openai", "me an", 1, True, ["none"], [], {}],
    "tools": [1, "", "{", {}, [1], [{}], [10**400], "\ud800"],
    "tool-choice": [
        *(1, "", "maybe", [], {}, {"type": "function"}),
        {"type": "function", "function": {"name": "a b"}},
    ],
    "arguments": [1, "", "[]", [], {"a b": 1}, "\ud800"],
    "efforts": [1, "low", [], {"lowest": 1}, {"low": -2}, {"low": True}, {"low": "1"}],
    "answer-form": [7, "nobody", [], {"calls": [{"begin": "a"}]}, {"marks": []}, "{"],
}


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda p: p.name)
def test_a_number_is_accepted_up_to_its_limits_and_refused_beyond(parameter: Parameter) -> None:
    step = 1 if parameter.kind == "int" else 0.125
    for good in (parameter.low, parameter.low + step, parameter.high):
        value = int(good) if parameter.kind == "int" else min(good, parameter.high)
        assert read_options({parameter.name: value}).values == {parameter.name: value}
    if parameter.name == "seed":
        return  # all whole numbers are seeds; see below
    for bad, nearest in (
        (parameter.low - step, parameter.low),
        (parameter.high + step, parameter.high),
        (math.inf, parameter.high),
        (-math.inf, parameter.low),
    ):
        with pytest.raises(InvalidArgument, match=f"{parameter.name}: .* outside") as caught:
            read_options({parameter.name: bad})
        assert caught.value.message.endswith(f"nearest: {nearest:.15g}")


def test_a_choice_accepts_its_names_and_the_empty_text_only_if_that_is_one() -> None:
    assert read_options({"pooling": ""}).values == {"pooling": ""}
    with pytest.raises(InvalidArgument, match="'' is not one of none, auto, deepseek"):
        read_options({"reasoning-format": ""})
    with pytest.raises(InvalidArgument, match="'median' is not one of none, mean, cls, last, rank"):
        read_options({"pooling-type": "median"})
    for parameter in (p for p in PARAMETERS if p.choices):
        for name in parameter.choices:
            for spelling in (name, name.upper()):
                assert read_options({parameter.name: spelling}).values == {parameter.name: name}


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.name)
def test_a_value_of_another_kind_is_refused_and_null_is_absent(parameter: Parameter) -> None:
    for value, read in GOOD.get(parameter.kind, ()):
        assert read_options({parameter.name: value}).values == {parameter.name: read}
    for value in BAD[parameter.kind]:
        if isinstance(value, bool) and "off" in parameter.choices:
            continue  # it stands for off, or for the choice after it
        with pytest.raises(InvalidArgument, match=parameter.name):
            read_options({parameter.name: value})
    assert read_options({parameter.name: None}).values == {}


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: p.name)
def test_every_spelling_is_read(parameter: Parameter) -> None:
    unset: Any = parameter.low if parameter.kind in ("int", "float") else []
    value = parameter.default if parameter.default is not None else unset
    for spelling in (parameter.name, *parameter.aliases):
        for key in (spelling, spelling.replace("-", "_"), spelling.upper()):
            assert read_options({key: value}).values == {parameter.name: value}


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_options({"temp": -1, "top-k": "x", "seeed": 1}, strict=True)
    assert caught.value.data["errors"] == [
        "temp: -1 is outside 0 … 100; nearest: 0",
        "top-k: 'x' is not a number",
        "unknown key 'seeed'; did you mean 'seed'?",
    ]


@pytest.mark.parametrize("parameter", [p for p in NUMBERS if p.kind == "int"], ids=lambda p: p.name)
@pytest.mark.parametrize("read", [read_options, lambda raw: parse_json_options(json.dumps(raw))])
def test_a_whole_number_may_be_written_as_a_float(parameter: Parameter, read: Any) -> None:
    for value in (max(parameter.low, 1), parameter.high):
        found = read({parameter.name: float(value)}).values[parameter.name]
        assert found == value and type(found) is int
    for bad in (parameter.low + 0.5, math.inf, math.nan):
        with pytest.raises((InvalidArgument, InvalidEncoding)):
            read({parameter.name: bad})


@pytest.mark.parametrize(
    ("key", "value", "used"),
    [
        ("stop-tokens", [5.0, 6], [5, 6]),
        ("logit-bias", [[5.0, 1]], [[5, 1.0]]),
        ("grammar-triggers", [{"type": 0.0, "token": 7.0}], [["token", 7]]),
        ("lora", [{"id": 0.0, "scale": 1}], [[0, 1.0]]),
        ("token-conditions", {"token_id": 5.0}, [5]),
        ("dynamic-timeout", {"base_ms": 5.0}, 5),
    ],
)
def test_a_whole_number_within_a_value_may_be_written_as_a_float(
    key: str, value: object, used: object
) -> None:
    [found] = read_options({key: value}).values.values()
    assert found == used and repr(found) == repr(used)


FUNCTION: dict[str, Any] = {"name": "look", "parameters": {"x": None}}
TOOL = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "tool",
    [
        {"function": {**FUNCTION, "description": None, "strict": None}},
        {**TOOL, "type": None, "cache": None},
        {**TOOL, "function": {**FUNCTION, "x": None}},
    ],
)
def test_a_null_in_a_tool_counts_as_absent_except_in_its_schema(tool: dict[str, Any]) -> None:
    for value in ([tool], json.dumps([tool])):
        assert read_options({"tools": value}).values == {"tools": [TOOL]}
    choice = {"type": "function", "function": {"name": "look", "description": None}}
    named = {"type": "function", "function": {"name": "look"}}
    assert read_options({"tool-choice": choice}).values == {"tool-choice": named}
    for wrong in ({**TOOL, "function": None}, {**TOOL, "function": {"name": None}}, None):
        with pytest.raises(InvalidArgument):
            read_options({"tools": [wrong]})


@pytest.mark.parametrize("key", ["tools", "lora", "grammar_triggers", "response_format", "foo"])
@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
def test_a_deep_value_is_refused_or_ignored(key: str, opening: str) -> None:
    closing = opening[::-1].translate(str.maketrans("[{", "]}", '":a'))
    text = f'{{"{key}": {opening * 300}1{closing * 300}}}'
    try:
        assert parse_json_options(text).ignored == ["foo"]
    except (InvalidArgument, InvalidEncoding) as exc:
        assert "recursion" not in str(exc)


SCHEMA = {"type": "object", "default": None}
TAG = {"begin": "<a>", "end": "</a>"}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a"], "tags": [{**TAG, "content": CONTENT}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("response_format", {"type": "json_object", "schema": None}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": None}}),
        (
            "response_format",
            {"type": "structural_tag", "structures": [TAG], "triggers": ["<a"], "format": None},
        ),
        ("structural_tag", {"format": {**TRIGGERED, "at_least_one": None}, "type": None}),
        ("structured_outputs", {"json": SCHEMA, "regex": None, "choice": None}),
        ("lora", [{"id": 0, "scale": None}]),
        ("lora", [{"name": None, "id": 0}]),
        ("grammar_triggers", [{"type": None, "value": "a", "token": None}]),
        ("token_conditions", [{"token_id": 5, "mode": None}]),
        ("pattern_conditions", [{"pattern": "a", "match_type": None}]),
        ("semantic_conditions", [{"type": "completion_detection", "threshold": None}]),
        ("dynamic_timeout", {"base_ms": None, "max_ms": 5}),
    ],
)
def test_a_null_within_a_value_counts_as_absent(key: str, value: Any) -> None:
    def present(item: Any) -> Any:
        if isinstance(item, list):
            return [present(each) for each in item]
        if isinstance(item, dict) and item is not SCHEMA:
            return {name: present(each) for name, each in item.items() if each is not None}
        return item

    assert present(value) != value
    found = read_options({key: value}).values
    assert found == read_options({key: present(value)}).values != {}
    assert ("default" in repr(found)) is ("default" in repr(value)), "a null in a schema stays"


@pytest.mark.parametrize(
    ("seed", "used"),
    [
        ((1 << 32) - 1, (1 << 32) - 1),
        (1 << 32, 0),
        (float(1 << 33) + 5, 5),
        (5 + (1 << 63), 5),
        ((1 << 64) - 1, (1 << 32) - 1),
        (-1, -1),
        (-2, (1 << 32) - 2),
        (-(1 << 40) + 3, 3),
    ],
)
def test_a_seed_beyond_32_bits_is_taken_modulo(seed: float, used: int) -> None:
    for strict in (True, False):
        options = read_options({"seed": seed}, strict=strict)
        assert options.values == {"seed": used}
        assert ("modulo 2^32" in options.adjusted.get("seed", "")) is (seed != used)
    for bad in (0.5, math.inf, math.nan, "7", True, 5e9 + 0.5):
        with pytest.raises(InvalidArgument):
            read_options({"seed": bad})


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda p: p.name)
def test_json_texts_have_numbers_out_of_range_clamped_unless_they_are_strict(
    parameter: Parameter,
) -> None:
    for bound, value in ((parameter.low, -1e12), (parameter.high, 1e12)):
        if parameter.name == "seed" or math.isinf(bound):
            continue
        options = parse_json_options(json.dumps({parameter.name: value, "llama3": 1}))
        assert options.values == {parameter.name: bound} and options.ignored == ["llama3"]
        assert set(options.adjusted) == {parameter.name}
        for strict in ({"strict": True}, {}):
            with pytest.raises(InvalidArgument, match=r" is outside .*; nearest: "):
                parse_json_options(json.dumps({parameter.name: value, **strict}), strict=not strict)
        with pytest.raises(InvalidArgument, match=" is outside "):
            read_options({parameter.name: value})
        again = {parameter.name: value, parameter.name.upper(): parameter.low}
        assert parse_json_options(json.dumps(again)).adjusted == {}, "the last spelling applies"


@pytest.mark.parametrize(
    ("key", "value", "used", "reason"),
    [
        ("n-predict", -3, -1, "-3 is outside -1 … 16777216: -1 is used"),
        (
            "seed",
            -2,
            (1 << 32) - 2,
            "-2 is outside 0 … 4294967295: 4294967294 is used, modulo 2^32",
        ),
        ("seed", 1 << 32, 0, "4294967296 is outside 0 … 4294967295: 0 is used, modulo 2^32"),
        ("seed", 5 + (1 << 65), 5, "5 is used, modulo 2^32"),
        ("temp", 101, 100.0, "101 is outside 0 … 100: 100 is used"),
        ("pooling-type", -1, "", "-1 means the default"),
        ("pooling_type", 3, "last", "3 means last"),
        ("cache-type-k", 8, "q8_0", "8 means q8_0"),
        ("cache-type-v", 1, "f16", "1 means f16"),
        ("rope-scaling-type", 2, "yarn", "2 means yarn"),
        ("rope-scaling-type", -1, "", "-1 means the default"),
        ("numa", 1, "distribute", "1 means distribute"),
        ("numa", "Disabled", "off", "'Disabled' means off"),
        ("flash-attn", "enabled", "on", "'enabled' means on"),
        ("flash_attn", "disabled", "off", "'disabled' means off"),
    ],
)
def test_json_texts_have_other_runtimes_values_adjusted(
    key: str, value: object, used: object, reason: str
) -> None:
    [(name, found)] = (options := parse_json_options(json.dumps({key: value}))).values.items()
    assert found == used and type(found) is type(used)
    assert options.adjusted[name].endswith(reason)


def test_an_n_predict_of_minus_2_ends_the_turn_when_the_context_is_full() -> None:
    for shift in (True, None):
        found = parse_json_options(json.dumps({"n_predict": -2, "context_shift": shift}))
        assert found.values == {"n-predict": -1, "ctx-shift": False}
        assert found.adjusted["n-predict"].startswith("-2 means until the context is full")
        assert ("ctx-shift" in found.adjusted) == (shift is True)
    again = parse_json_options('{"n-predict":-2,"ctx-shift":true,"max_tokens":5}')
    assert again.values == {"n-predict": 5, "ctx-shift": True} and again.adjusted == {}


@pytest.mark.parametrize(
    ("key", "value", "used", "reason"),
    [
        (
            "logit-bias",
            [[5, 2e6], ["a", -1e7], [7, False], [8, 1]],
            [[5, 1e6], ["a", -1e6], [7, False], [8, 1.0]],
            (
                "the bias of 5: 2000000.0 is outside -1000000 … 1000000: 1000000 is used;"
                " the bias of 'a': -10000000.0 is outside -1000000 … 1000000: -1000000 is used"
            ),
        ),
        (
            "logit_bias",
            {"5": int("9" * 400), "a": 1},
            [[5, 1e6], ["a", 1.0]],
            ": 1000000 is used",
        ),
        (
            "logit-bias",
            [[n, 1e7] for n in range(9)],
            [[n, 1e6] for n in range(9)],
            "; and 5 more",
        ),
        (
            "tensor-split",
            [-1, 3],
            [0.0, 3.0],
            "device 0: -1.0 is outside 0 … 1000000: 0 is used",
        ),
        ("tensor_split", "3,2e9", [3.0, 1e6], "is outside 0 … 1000000: 1000000 is used"),
        ("tensor-split", [0, -1], [], "every device has a share of 0: the free memory decides"),
        (
            "lora",
            {"style": 101, "tone": -1},
            [["style", 100.0], ["tone", -1.0]],
            "scale of 'style': 101 is outside -100 … 100: 100 is used",
        ),
        (
            "lora",
            [{"id": 0, "scale": -1000}, ["tone", 1e9]],
            [[0, -100.0], ["tone", 100.0]],
            ": 100 is used",
        ),
    ],
)
def test_json_texts_have_numbers_within_values_clamped_unless_they_are_strict(
    key: str, value: object, used: object, reason: str
) -> None:
    text = json.dumps({key: value})
    [(name, found)] = (options := parse_json_options(text)).values.items()
    assert found == used and options.adjusted[name].endswith(reason)
    with pytest.raises(InvalidArgument):
        parse_json_options(text, strict=True)
    with pytest.raises(InvalidArgument):
        parse_json_options(json.dumps({key: value, "strict": True}))
    with pytest.raises(InvalidArgument):
        read_options({key: value})


@pytest.mark.parametrize(
    ("key", "value"), [("seed", -1), ("seed", (1 << 32) - 1), ("n-predict", -1), ("pooling", "cls")]
)
def test_json_texts_keep_values_in_range(key: str, value: object) -> None:
    options = parse_json_options(json.dumps({key: value}))
    assert options.values == {key: value} and options.adjusted == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("temp", "hot"), ("top-k", 1.5), ("seed", 0.5), ("temp", True), ("pooling-type", 9)],
        *[("numa", 4), ("cache-type-k", 16), ("rope-scaling", 1.5), ("flash-attn", 1)],
        *[("logit-bias", [[True, 1]]), ("lora", {"a": "1"}), ("tensor-split", [True])],
    ],
)
def test_json_texts_have_values_of_another_kind_refused(key: str, value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_json_options(json.dumps({key: value}))


@pytest.mark.parametrize("key", IGNORED_KEYS)
def test_a_key_without_effect_is_reported_or_with_strict_refused(key: str) -> None:
    options = read_options({key: "x", "temp": 0})
    assert options.ignored == [key] and options.values == {"temp": 0}
    for strict in ({"strict": True}, {}):
        with pytest.raises(InvalidArgument, match="has no effect here: "):
            read_options({key: "x", **strict}, strict=not strict)


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_key_whose_answer_would_be_wrong_is_refused_unless_it_is_off(key: str) -> None:
    with pytest.raises(UnsupportedOperation, match=f"^{key}: .* \\(leave the key out"):
        read_options({key: "x"})
    with pytest.raises(InvalidArgument, match="is not supported: "):
        read_options({key: "x"}, strict=True)
    for off in (False, "", None):
        assert read_options({key: off}).values == {}


def test_a_legacy_document_of_wasi_nn_backend_is_read_whole() -> None:
    text = (
        '{"n_gpu_layers":98,"ctx_size":2048,"n_predict":512,"batch_size":512,"threads":8,'
        '"temp":0.7,"top_p":0.95,"repeat_penalty":1.10}'
    )
    options = parse_json_options(text)
    assert options.ignored == []
    assert options.values == {
        key.replace("_", "-"): value for key, value in json.loads(text).items()
    }


def test_a_nested_document_of_wasi_nn_backend_is_read_whole() -> None:
    options = parse_json_options(
        '{"sampling":{"dynatemp":{"range":0.1,"exponent":1.2}},"memory_management":'
        '{"cache_policy":{"enable_prompt_cache":true,"retention_ms":300000}}}'
    )
    assert options.ignored == []
    assert options.values == {
        "dynatemp-range": 0.1,
        "dynatemp-exponent": 1.2,
        "cache-prompt": True,
        "retention-ms": 300_000,
    }


def test_the_sections_of_wasi_nn_backend_are_read_as_if_they_stood_at_the_top() -> None:
    options = read_options(
        {
            "backend": {"max_sessions": 5, "temp": 0.5},
            "model": {"n_ctx": 512},
            "sampling": {"mirostat": 2, "mirostat_tau": 4, "dry": {"base": 2}},
            "stopping": {"max_tokens": 9, "stop": ["."]},
            "memory": {"n_keep_tokens": 64, "cache_strategy": "lru"},
            "logging": {"level": "debug"},
            "logit_bias": [[3, -1]],
        }
    )
    assert options.values == {
        "temp": 0.5,
        "ctx-size": 512,
        "mirostat": 2,
        "mirostat-tau": 4,
        "dry-base": 2,
        "n-predict": 9,
        "stop": ["."],
        "n-keep": 64,
        "logit-bias": [[3, -1.0]],
    }
    assert options.ignored == ["max_sessions", "cache_strategy", "level"]


@pytest.mark.parametrize(
    ("form", "schema"),
    [
        ({"type": "text"}, ""),
        ({"type": "json_object"}, '{"type":"object"}'),
        ({"type": "json_object", "schema": {"type": "array"}}, '{"type":"array"}'),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": 1}}, "{}"),
    ],
)
def test_openais_formats_of_answers_are_schemas(form: dict[str, Any], schema: str) -> None:
    for key in ("response-format", "response_format"):
        assert read_options({key: form}, strict=True).values == {"json-schema": schema}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("text", "'text' is not a format"),
        ({}, "there is no type null; use text, json_object, json_schema"),
        ({"type": "xml"}, "there is no type 'xml'; use text"),
        ({"type": ["text"]}, "there is no type"),
        ({"type": "json_schema"}, "the schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "the schema is missing"),
        ({"type": "json_object", "schema": []}, "the schema is missing"),
    ],
)
def test_a_format_that_is_unknown_or_lacks_its_schema_is_refused(form: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"response_format: {re.escape(says)}"):
        read_options({"response_format": form})


@pytest.mark.parametrize("form", [{"type": "text"}, {"type": "json_object"}])
@pytest.mark.parametrize("key", ["json_schema", "guided_json"])
def test_a_format_and_a_schema_contradict_each_other(key: str, form: dict[str, str]) -> None:
    """In any order of the keys, and it is reported once."""
    given: dict[str, Any] = {key: {}, "response_format": form}
    for first, second in ((key, "response_format"), ("response_format", key)):
        with pytest.raises(InvalidArgument) as caught:
            read_options({name: given[name] for name in (first, second)})
        assert caught.value.data["errors"] == [
            f"{second}: {first} is given too; leave one of them out"
        ]


@pytest.mark.parametrize("text", ["[1]", "7", '"a"', "{", "{]", '{"a":' * 2000, b"\xff"])
def test_text_that_is_not_a_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidEncoding):
        parse_json_options(text)


@pytest.mark.parametrize(
    "values",
    [
        '{"chat-template-kwargs": {"n": 18446744073709551616}}',
        '{"chat-template-kwargs": "{\\"n\\": -9223372036854775809}"}',
        '{"logit-bias": [[18446744073709551616, 1]]}',
    ],
)
def test_numbers_that_no_message_can_carry_are_refused(values: str) -> None:
    with pytest.raises(InvalidArgument, match=r"64 bits|not a token's number"):
        parse_json_options(values)


# Contradictions


@pytest.mark.parametrize(
    ("values", "key", "holds"),
    [
        ({"mirostat": 2, "samplers": ["top-k"]}, "samplers", ["temperature"]),
        ({"dry-base": 0.5}, "dry-base", 1.75),
        ({"adaptive-target": 0.5}, "adaptive-target", 0.5),
        ({"xtc-probability": 1.0, "xtc-threshold": 0.6}, "xtc-threshold", 0.6),
        ({"grammar": "root ::= [a]", "ignore-eos": True}, "ignore-eos", False),
        ({"grammar": "root ::= [a]", "ctx-shift": True}, "ctx-shift", False),
        ({"json-schema": "{}", "ignore-eos": True}, "ignore-eos", False),
        ({"json-schema": "{}", "ctx-shift": True}, "ctx-shift", False),
    ],
    ids=str,
)
def test_adjusted_parameters_are_reported(values: dict[str, Any], key: str, holds: object) -> None:
    before = dict(values)
    adjusted, reasons = adjust_parameters(values)
    assert adjusted[key] == holds and list(reasons) == [key] and reasons[key]
    assert values == before


WITH_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("beside", "has_effect"),
    [
        ({}, False),
        ({"grammar": 'root ::= "a"'}, False),
        ({"json-schema": '{"type": "object"}'}, True),
        ({"tools": [WITH_SCHEMA]}, True),
    ],
)
def test_keywords_are_inferred_for_any_schema_of_an_answer(
    beside: dict[str, Any], has_effect: bool
) -> None:
    """The arguments of a tool's calls follow its schema."""
    _, reasons = adjust_parameters({"schema-infer": "types"} | beside)
    assert ("schema-infer" not in reasons) is has_effect


def test_mirostat_replaces_the_default_chain_without_a_report() -> None:
    adjusted, reasons = adjust_parameters({"mirostat": 1})
    assert adjusted["samplers"] == ["temperature"] and reasons == {}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"dry-sequence-breakers": []}, "empty"),
        ({"dry-sequence-breakers": ["x" * 41]}, "41 characters; 40"),
        ({"dry-sequence-breakers": ["x"] * 9}, "9 texts; 8"),
        ({"samplers": ["infill"]}, "infill needs top-k"),
        ({"grammar": "root ::= " + "(" * 101}, "101 brackets are open at once; 100"),
        ({"grammar": "root ::= [a]", "json-schema": "{}"}, "json-schema: grammar is set too"),
        ({"samplers": ["infill", "top-k"]}, "infill needs top-k"),
        ({"samplers": ["top-k", "infill"], "top-k": 0}, "infill needs top-k"),
        ({"samplers": ["top-k", "infill"], "top-k": 1001}, "infill needs top-k"),
    ],
    ids=str,
)
def test_contradictory_parameters_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        adjust_parameters(values)


def test_parameters_at_their_limits_are_accepted() -> None:
    values: dict[str, Any] = {
        "dry-sequence-breakers": ["x" * 40] * 8,
        "samplers": ["top-k", "infill"],
    }
    values["grammar"] = f"root ::= {'(' * 100}[a]{')' * 100}"
    assert adjust_parameters(values | {"top-k": 1000})[1] == {}


def test_sampling_params_have_the_values_that_were_read() -> None:
    values = read_options(
        {"temp": 0.5, "samplers": "kt", "logit_bias": {"7": False}, "stop": ["x"]}
    ).values
    params = sampling_params(values, seed=9)
    assert (params.seed, params.temp, params.samplers) == (9, 0.5, ("top-k", "temperature"))
    assert params.logit_bias == ((7, False),)
    assert sampling_params({}, 0).samplers == tuple(SAMPLERS)[:9]


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, -1),
        ({"reasoning_budget": 0}, 0),
        ({"thinking_budget_tokens": 7}, 7),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "max"}, -1),
        ({"reasoning_effort": "low", "reasoning_budget": 2000}, 1024),
        ({"reasoning_effort": "max", "reasoning_budget_tokens": 2000}, 2000),
        ({"reasoning_effort": "low", "reasoning_efforts": {"low": 5.0}}, 5),
        ({"reasoning_effort": "high", "reasoning_efforts": {"low": 5}}, 24_576),
    ],
)
def test_the_smaller_bound_of_reasoning_applies(options: dict[str, Any], budget: int) -> None:
    values = {p.name: p.default for p in PARAMETERS} | read_options(options, strict=True).values
    assert reasoning_budget(values) == budget


def test_the_message_before_a_forced_end_is_bounded() -> None:
    adjust_parameters({"reasoning-budget-message": "a" * 1024})
    with pytest.raises(InvalidArgument, match="reasoning-budget-message: 1025 characters"):
        adjust_parameters({"reasoning-budget-message": "a" * 1025})

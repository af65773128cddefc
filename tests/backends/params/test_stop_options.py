"""Stop conditions are read from JSON: inferd's parameters, and the forms of other runtimes."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.incremental_regex import WEIGHT_MAX
from inferd.backends.params import (
    StoppingParams,
    adjust_parameters,
    read_options,
    sampling_params,
    stopping_params,
)
from inferd.backends.params.sampler_options import (
    PATTERNS_MAX,
    SIMILARITY_CHARACTERS_MAX,
    TOKENS_MAX,
    TRIGGERS_MAX,
)


@pytest.mark.parametrize(
    ("document", "values"),
    [
        ({"stop_token_ids": 7}, {"stop-tokens": [7]}),
        ({"token_conditions": [{"token_id": 7, "mode": "stop_on_token"}]}, {"stop-tokens": [7]}),
        (
            {"pattern_conditions": [{"pattern": "END", "match_type": "partial"}]},
            {"stop-patterns": ["END"]},
        ),
        (
            {"pattern_conditions": [{"pattern": "(?i)end|no", "match_type": "full"}]},
            {"stop-patterns": [r"(?i)\A(?:end|no)"]},
        ),
        (
            {"semantic_conditions": [{"type": "completion_detection", "threshold": 0.8}]},
            {"stop-complete": ["sentence"]},
        ),
        (
            {"semantic_conditions": [{"type": "repetition_detection", "threshold": 0.5}]},
            {"stop-repetition": 0.5},
        ),
        (
            {"semantic_conditions": [{"type": "coherence_break"}]},
            {"stop-surprisal": pytest.approx(math.log(5))},
        ),
        (
            {"semantic_conditions": [{"type": "similarity", "text": "a b", "threshold": 0.9}]},
            {"stop-similarity": "a b", "stop-similarity-threshold": 0.9},
        ),
        (
            {"semantic_conditions": {"type": "similarity_detection", "target": "a b"}},
            {"stop-similarity": "a b", "stop-similarity-threshold": 0.8},
        ),
        (
            {"dynamic_timeout": {"base_ms": 500, "token_scale": 2.5, "max_ms": 9000}},
            {"timeout-base-ms": 500, "timeout-token-ms": 2.5, "timeout-max-ms": 9000},
        ),
        ({"stopping": {"stop_sequences": ["a"], "n_indent": 2}}, {"stop": ["a"], "n-indent": 2}),
        (
            {"grammar_triggers": [{"type": 1, "value": "<tool"}, {"type": "token", "token": 3}]},
            {"grammar-triggers": [["word", "<tool"], ["token", 3]]},
        ),
        (
            {"grammar_triggers": [{"type": "pattern_full", "value": "a+b"}, "x", ["pattern", "c"]]},
            {"grammar-triggers": [["pattern-full", "a+b"], ["word", "x"], ["pattern", "c"]]},
        ),
    ],
    ids=str,
)
def test_every_form_is_read(document: dict[str, Any], values: dict[str, Any]) -> None:
    for form in (document, {"stopping": document}):
        if "stopping" in document and form is not document:
            continue
        options = read_options(form, strict=True)
        assert options.values == values and options.ignored == []


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"token_conditions": [{"token_id": "x"}]}, "'x' is not a token's number"),
        ({"token_conditions": [{"token_id": 3, "mode": "count"}]}, "no mode 'count'"),
        ({"token_conditions": [3]}, "not a condition"),
        ({"token_conditions": [{"token_id": 1}] * 513}, "513 items; 512 at most"),
        ({"pattern_conditions": [{"pattern": 3}]}, "is not a pattern"),
        ({"pattern_conditions": [{"pattern": "a", "match_type": "some"}]}, "is not a pattern"),
        ({"semantic_conditions": [{"type": "mood"}]}, "no condition 'mood'; use completion_"),
        ({"semantic_conditions": [{"type": "similarity"}]}, "null is not a text"),
        ({"semantic_conditions": [{"type": "similarity", "text": " "}]}, "' ' is not a text"),
        ({"semantic_conditions": [{"type": "similarity", "text": "a", "threshold": 1}]}, "between"),
        ({"semantic_conditions": [{"type": "coherence_break", "threshold": 1}]}, "between 0 and 1"),
        ({"dynamic_timeout": {"base_ms": -2}}, "outside -1"),
        ({"dynamic_timeout": {"base": 2}}, "no 'base'; use base_ms"),
        ({"grammar_triggers": [{"type": "tokens"}]}, "no trigger 'tokens'"),
        ({"grammar_triggers": [{"type": 4, "value": "a"}]}, "no trigger 4"),
        ({"grammar_triggers": [{"type": "word", "value": ""}]}, "not a text that can start"),
        ({"grammar_triggers": [{"type": "token", "value": "a"}]}, "not a token's number"),
    ],
    ids=str,
)
def test_an_invalid_form_is_refused_with_its_key(document: dict[str, Any], says: str) -> None:
    [key] = document
    with pytest.raises(InvalidArgument, match=says) as caught:
        read_options(document)
    assert caught.value.message.startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"stop-patterns": ["("]}, "stop-patterns: the pattern '\\('"),
        ({"stop-patterns": ["a"] * (PATTERNS_MAX + 1)}, f"{PATTERNS_MAX} at most"),
        ({"stop-patterns": ["a{900}", "b{900}"]}, f"through 1802 states; {WEIGHT_MAX} at most"),
        ({"stop-complete": ["poem"]}, "'poem'; there are json, fence, sentence"),
        ({"stop-tokens": [1] * (TOKENS_MAX + 1)}, f"{TOKENS_MAX} at most"),
        ({"grammar-lazy": True, "grammar": "root ::= [a]"}, "grammar-triggers are missing"),
        ({"grammar-triggers": [["pattern", "a$"]]}, "cannot be decided"),
        ({"grammar-triggers": [["word", "a" * 600]]}, "600 characters"),
        ({"grammar-triggers": [["word", "a"]] * (TRIGGERS_MAX + 1)}, f"{TRIGGERS_MAX} at most"),
        ({"grammar-triggers": [["token", 1]] * (TOKENS_MAX + 1)}, f"{TOKENS_MAX} at most"),
    ],
    ids=lambda v: str(v)[:60],
)
def test_invalid_conditions_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        adjust_parameters(values)


def test_conditions_at_their_limits_are_accepted() -> None:
    values: dict[str, Any] = {
        "grammar": "root ::= [a]",
        "stop-patterns": ["a{123}b"] * PATTERNS_MAX,
        "stop-tokens": [1] * TOKENS_MAX,
        "grammar-triggers": [["word", "a"]] * TRIGGERS_MAX + [["token", 1]] * TOKENS_MAX,
    }
    assert adjust_parameters(values)[1] == {}


@pytest.mark.parametrize(
    ("values", "key", "holds"),
    [
        ({"stop-grammar": True}, "stop-grammar", True),
        ({"grammar-triggers": [["word", "a"]]}, "grammar-triggers", [["word", "a"]]),
        (
            {
                "grammar": "root ::= [a]",
                "grammar-lazy": False,
                "grammar-triggers": [["word", "a"]],
            },
            "grammar-triggers",
            [],
        ),
    ],
    ids=str,
)
def test_conditions_without_effect_are_reported(
    values: dict[str, Any], key: str, holds: object
) -> None:
    adjusted, reasons = adjust_parameters(values)
    assert adjusted[key] == holds and list(reasons) == [key]


def test_the_engine_gets_the_values_that_were_read() -> None:
    values = read_options(
        {"stop_patterns": "a+", "stop_token_ids": [3], "n_indent": 2, "stop_repetition": 0.5}
    ).values
    assert stopping_params(values) == StoppingParams(
        stop_patterns=("a+",), stop_tokens=(3,), n_indent=2, stop_repetition=0.5
    )
    assert stopping_params({"stop": ["x"], "temp": 0}) == StoppingParams()
    triggers = read_options({"grammar_triggers": ["<tool>"]}).values
    assert sampling_params(triggers, 1).grammar_triggers == (("word", "<tool>"),)


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("stop_similarity", "", ""),
        ("stop-similarity", "a", "a"),
        ("similarity-text", "ü" * SIMILARITY_CHARACTERS_MAX, "ü" * SIMILARITY_CHARACTERS_MAX),
        ("stop-similarity", "a" * (SIMILARITY_CHARACTERS_MAX + 1), "4097 characters; 4096 at most"),
        ("stop-similarity", " \n", "the text is blank"),
        ("stop-similarity", 3, "3 is not a text"),
        ("stop-similarity", "a\0b", "it contains a NUL"),
        ("stop-similarity-threshold", 0, 0.0),
        ("similarity_threshold", 0.5, 0.5),
        ("stop-similarity-threshold", 1, 1.0),
        ("stop-similarity-threshold", -0.001, "-0.001 is outside 0 … 1; nearest: 0"),
        ("stop-similarity-threshold", 1.001, "1.001 is outside 0 … 1; nearest: 1"),
        ("stop-similarity-threshold", float("nan"), "nan is outside 0 … 1"),
        ("stop-similarity-threshold", "high", "'high' is not a number"),
        ("similarity-model", "judge", "judge"),
        ("similarity-model", True, "true is not a text"),
        ("similarity-wait-ms", 1, 1),
        ("similarity-wait-ms", 60_000, 60_000),
        ("similarity-wait-ms", 0, "0 is outside 1 … 60000; nearest: 1"),
        ("similarity-wait-ms", 60_001, "60001 is outside 1 … 60000; nearest: 60000"),
        ("similarity-wait-ms", 1.5, "1.5 is not a whole number"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_similarity_parameters_at_inside_and_outside_their_limits(
    key: str, value: object, read: object
) -> None:
    if isinstance(read, str) and " " in read:
        with pytest.raises(InvalidArgument, match=re.escape(str(read))):
            adjust_parameters(read_options({key: value}, strict=True).values)
    else:
        [found] = adjust_parameters(read_options({key: value}, strict=True).values)[0].values()
        assert found == read and type(found) is type(read)

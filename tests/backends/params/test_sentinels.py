"""Values with a meaning of their own in WasmEdge, WAMR, wasi_nn_backend, llama.cpp and Ollama."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.backends.params import parse_json_options, read_options
from inferd.backends.params.parameter_table import PARAMETERS, Parameter

DEFAULT = "-1 means the configured default"
OWN: dict[str, tuple[float, ...]] = {
    "n-predict": (-1,),
    "seed": (-1,),
    "top-k": (-1, 0),
    "last-n-penalty": (-1, 0),
    "dry-penalty-last-n": (-1, 0),
    "n-keep": (-1,),
    "n-gpu-layers": (-1,),
    "main-gpu": (-1,),
    "top-n-sigma": (-1,),
    "adaptive-target": (-1,),
    "presence-penalty": (-1,),
    "frequency-penalty": (-1,),
    "keep-alive": (-1, 0),
    "embd-normalize": (-1,),
    "t-max-predict-ms": (-1, 0),
    "t-max-prompt-ms": (-1, 0),
    "ctx-size": (0,),
    "threads": (0,),
    "threads-batch": (0,),
    "n-discard": (0,),
    "mirostat": (0,),
    "dynatemp-range": (0,),
}
"""Values that a parameter has itself, with the meaning in its description."""
NUMBERS = [p for p in PARAMETERS if p.kind in ("int", "float")]
WITHOUT = [p for p in NUMBERS if p.low > -1]
RUNTIME_KEYS = (
    *("temperature", "temp", "top_p", "min_p", "typical_p", "repeat_penalty", "dry_multiplier"),
    *("dry_base", "dry_allowed_length", "dynatemp_range", "dynatemp_exponent", "mirostat"),
    *("mirostat_tau", "mirostat_eta", "n_probs", "logprobs", "min_keep"),
)
"""Keys of wasi_nn_backend's `run_inference` for which -1 means the configured value."""


def read(key: str, value: Any, **before: Any) -> tuple[dict[str, Any], dict[str, str]]:
    options = parse_json_options(json.dumps({**before, key: value}))
    return options.values, options.adjusted


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OWN.items() for v in values])
def test_a_sentinel_of_a_parameter_is_its_value(name: str, value: float) -> None:
    assert read(name, value) == ({name: value}, {})
    assert read_options({name: value}, strict=True).values == {name: value}


def test_each_parameter_has_minus_one_or_takes_it_for_the_default() -> None:
    own = {p.name for p in NUMBERS if p.low <= -1}
    assert {n for n, values in OWN.items() if -1 in values} <= own
    assert own.isdisjoint(p.name for p in WITHOUT) and len(own) + len(WITHOUT) == len(NUMBERS)


@pytest.mark.parametrize("parameter", WITHOUT, ids=lambda p: p.name)
@pytest.mark.parametrize("value", [-1, -1.0])
def test_minus_one_means_the_configured_default(parameter: Parameter, value: float) -> None:
    assert read(parameter.name, value) == ({}, {parameter.name: DEFAULT})
    middle = max(parameter.low, 1) if parameter.high >= 1 else parameter.high
    assert read(parameter.name, value, **{parameter.name.upper(): middle})[0] == {}
    for strict in (read_options, lambda raw: parse_json_options(json.dumps(raw), strict=True)):
        with pytest.raises(InvalidArgument, match=f"{parameter.name}: -1"):
            strict({parameter.name: value})


@pytest.mark.parametrize("key", RUNTIME_KEYS)
@pytest.mark.parametrize("place", [None, "sampling", "runtime"])
def test_the_keys_of_wasi_nn_backend_keep_the_configured_value(key: str, place: str | None) -> None:
    values, adjusted = read(place, {key: -1}) if place else read(key, -1)
    assert values == {} and list(adjusted.values()) == [DEFAULT]


@pytest.mark.parametrize(
    ("key", "value", "used", "reason"),
    [
        ("temp", -0.5, 0, "-0.5 is outside"),
        ("temp", -2, 0, "-2 is outside"),
        ("repeat-penalty", 0, 0.01, "0 is outside"),
        ("top-p", 1.5, 1, "1.5 is outside"),
        ("ctx-size", -2, 0, "-2 is outside"),
        ("n-predict", -3, -1, "-3 is outside"),
        ("top-k", -2, -1, "-2 is outside"),
        ("last-n-penalty", -2, -1, "-2 is outside"),
        ("n-gpu-layers", -2, -1, "-2 means all layers"),
        ("n-gpu-layers", -3, -1, "-3 is outside"),
    ],
)
def test_other_values_out_of_range_are_adjusted(
    key: str, value: float, used: float, reason: str
) -> None:
    values, adjusted = read(key, value)
    assert values == {key: used} and adjusted[key].startswith(reason)


def test_minus_two_tokens_mean_until_the_context_is_full() -> None:
    values, adjusted = read("n_predict", -2, **{"ctx-shift": True})
    assert values == {"n-predict": -1, "ctx-shift": False}
    assert adjusted.keys() == {"n-predict", "ctx-shift"}


STOPPING = {
    "stop_sequences": ["\n\n"],
    "max_tokens": 200,
    "max_time_ms": 30000,
    "grammar_triggers": {"enabled": True, "patterns": ["^\\s*$", "[.!?]\\s*$"]},
    "timeout_config": {"enabled": True, "max_inference_time_ms": 30000},
    "semantic_stopping": {"enabled": True, "completion_confidence_threshold": 0.85},
    "token_filters": {"forbidden_tokens": ["<unk>"]},
}
"""As in the tests of wasi_nn_backend, which reads the first two."""


def test_a_configuration_of_wasi_nn_backend_is_read() -> None:
    config = {"stopping": STOPPING, "backend": {"max_concurrent": 2, "auto_cleanup_sessions": True}}
    options = parse_json_options(json.dumps(config))
    assert options.values == {"stop": ["\n\n"], "n-predict": 200} and not options.adjusted
    unread = [*list(STOPPING)[2:], "max_concurrent", "auto_cleanup_sessions"]
    assert options.ignored == unread
    with pytest.raises(InvalidArgument) as caught:
        parse_json_options(json.dumps(config), strict=True)
    errors = caught.value.data["errors"]
    assert [error.split("'")[1] for error in errors] == unread
    assert all("has no effect here: " in error for error in errors)


@pytest.mark.parametrize(
    "value", [{}, {"enabled": False}, {"patterns": []}, {"enabled": True, "patterns": ["x"]}]
)
def test_patterns_of_ends_are_no_triggers(value: Any) -> None:
    options = parse_json_options(json.dumps({"stopping": {"grammar_triggers": value}}))
    assert options.ignored == ["grammar_triggers"] and not options.values


@pytest.mark.parametrize(
    "value", ["{", {"type": "word", "value": "{"}, {"type": 1, "value": "{"}, ["word", "{"]]
)
def test_other_objects_and_texts_are_triggers(value: Any) -> None:
    value = [value] if isinstance(value, list) else value
    assert read("grammar_triggers", value)[0] == {"grammar-triggers": [["word", "{"]]}

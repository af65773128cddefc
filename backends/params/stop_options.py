"""Parameters of stop conditions, apart from the end mark, stop texts and bounds on length."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import InvalidArgument
from ..incremental_regex import WEIGHT_MAX, Pattern
from .table import BY_NAME

COMPLETE = ("json", "fence", "sentence")
PATTERNS_MAX = 8
TRIGGERS_MAX = 16
TOKENS_MAX = 256
SIMILARITY_CHARACTERS_MAX = 4096


class StoppingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The stop conditions of a whole turn; each is off at its default."""

    stop_tokens: tuple[int, ...] = ()
    stop_patterns: tuple[str, ...] = ()
    stop_complete: tuple[str, ...] = ()
    stop_grammar: bool = False
    stop_repetition: float = 0.0
    stop_repetition_window: int = 128
    stop_surprisal: float = 0.0
    stop_surprisal_window: int = 32
    stop_similarity: str = ""
    stop_similarity_threshold: float = 0.8
    n_indent: int = 0
    t_max_prompt_ms: int = -1
    t_max_predict_ms: int = -1
    timeout_base_ms: int = -1
    timeout_token_ms: float = 0.0
    timeout_max_ms: int = -1


_FIELDS = {f: f.replace("_", "-") for f in StoppingParams.__struct_fields__}


def stopping_params(values: Mapping[str, Any]) -> StoppingParams:
    """Return the stop conditions in *values* (by parameter name)."""
    found: dict[str, Any] = {f: values[n] for f, n in _FIELDS.items() if n in values}
    fixed: dict[str, Any] = {f: tuple(v) for f, v in found.items() if isinstance(v, list)}
    return StoppingParams(**{**found, **fixed})


def trigger_pattern(kind: str, value: str) -> Pattern:
    """Return the pattern whose match starts a lazy grammar; a word matches itself.

    :raises InvalidArgument: the pattern cannot be run.
    :raises UnsupportedOperation: no pattern can be run on this Python.
    """
    if kind == "word":
        return Pattern.cached(re.escape(value))
    return Pattern.cached(value, kind == "pattern-full")


Rule = Callable[[dict[str, Any], dict[str, str], list[str]], None]
"""A rule of `adjust_parameters`: changes values, records the reasons by name, appends errors."""


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a parameter, or its default."""
    return values.get(name, BY_NAME[name].default)


def _check_patterns(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    stops = [("pattern", text) for text in value_of(values, "stop-patterns")]
    triggers = [(k, v) for k, v in value_of(values, "grammar-triggers") if k != "token"]
    _check_weight("stop-patterns", stops, PATTERNS_MAX, errors)
    _check_weight("grammar-triggers", triggers, TRIGGERS_MAX, errors)


def _check_weight(
    name: str, patterns: Sequence[tuple[str, str]], count_max: int, errors: list[str]
) -> None:
    if len(patterns) > count_max:
        errors.append(f"{name}: {len(patterns)} patterns; {count_max} at most")
        return
    try:
        weight = sum(trigger_pattern(*pattern).weight for pattern in patterns)
    except InvalidArgument as exc:
        errors.append(f"{name}: {exc.message}; {exc.hint}")
        return
    if weight > WEIGHT_MAX:
        errors.append(
            f"{name}: a character takes them through {weight} states; {WEIGHT_MAX} at most"
        )


def _check_stops(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    unknown = [name for name in value_of(values, "stop-complete") if name not in COMPLETE]
    if unknown:
        known = ", ".join(COMPLETE)
        errors.append(f"stop-complete: {unknown[0][:40]!r}; there are {known}")
    count = len(value_of(values, "stop-tokens"))
    if count > TOKENS_MAX:
        errors.append(f"stop-tokens: {count} tokens; {TOKENS_MAX} at most")
    text = value_of(values, "stop-similarity")
    if len(text) > SIMILARITY_CHARACTERS_MAX:
        errors.append(
            f"stop-similarity: a text of {len(text)} characters; {SIMILARITY_CHARACTERS_MAX} at"
            " most, as for a sentence"
        )
    if text and not text.strip():
        errors.append("stop-similarity: the text is blank; leave it empty for off")


def _check_triggers(values: dict[str, Any], adjusted: dict[str, str], errors: list[str]) -> None:
    triggers = value_of(values, "grammar-triggers")
    grammar = value_of(values, "grammar") or value_of(values, "json-schema")
    tokens = sum(kind == "token" for kind, _ in triggers)
    if tokens > TOKENS_MAX:
        errors.append(f"grammar-triggers: {tokens} tokens; {TOKENS_MAX} at most")
    if value_of(values, "grammar-lazy") and not triggers:
        errors.append("grammar-lazy: there are no grammar-triggers to start the grammar")
    if triggers and values.get("grammar-lazy") is False:
        adjusted["grammar-triggers"] = (
            "grammar-lazy is false: the grammar applies from the beginning"
        )
        values["grammar-triggers"] = []
    for name in ("grammar-triggers", "stop-grammar"):
        if value_of(values, name) and not grammar:
            adjusted[name] = "there is no grammar"


STOPPING_RULES: tuple[Rule, ...] = (_check_patterns, _check_stops, _check_triggers)
"""The rules of `adjust_parameters` on stop conditions and grammar triggers."""

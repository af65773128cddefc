"""Parameters of stop conditions, apart from the end mark, stop texts and bounds on length.

The triggers of lazy grammars are checked here, too, because they are patterns like stop patterns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..errors import InvalidArgument
from ..incremental_regex import STEPS_MAX, WEIGHT_MAX, Pattern
from .fitting import Adjustment, Rule, fields_of

COMPLETE_KINDS = ("json", "fence", "sentence")
"""The values of `stop-complete`; `scheduler.stopping.text_conditions` implements each."""
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


def stopping_params(values: Mapping[str, Any]) -> StoppingParams:
    """Return the stop conditions in *values* (by parameter name)."""
    return StoppingParams(**fields_of(StoppingParams, values))


def trigger_pattern(kind: str, value: str) -> Pattern:
    """Return the `Pattern` whose match starts a lazy grammar; a word matches itself."""
    if kind == "word":
        return Pattern.cached(re.escape(value))
    return Pattern.cached(value, kind == "pattern-full")


def _check_patterns(a: Adjustment) -> None:
    stops = [("pattern", text) for text in a.value_of("stop-patterns")]
    triggers = [(k, v) for k, v in a.value_of("grammar-triggers") if k != "token"]
    _check_weight(a, "stop-patterns", stops, PATTERNS_MAX)
    _check_weight(a, "grammar-triggers", triggers, TRIGGERS_MAX)


def _check_weight(
    a: Adjustment, name: str, patterns: Sequence[tuple[str, str]], count_max: int
) -> None:
    if len(patterns) > count_max:
        return a.limit(name, len(patterns), count_max, "patterns")
    weight = steps = 0
    for pattern in patterns:
        try:
            compiled = trigger_pattern(*pattern)
        except InvalidArgument as exc:
            return a.errors.append(f"{name}: {exc.message}; {exc.hint}")
        weight += compiled.weight
        steps += compiled.steps
        if weight > WEIGHT_MAX:
            return a.errors.append(
                f"{name}: one character takes them through {weight} states; {WEIGHT_MAX} at most:"
                " use fewer patterns, repeats and alternatives"
            )
        if steps > STEPS_MAX:
            return a.errors.append(f"{name}: together they repeat too much")


def _check_stops(a: Adjustment) -> None:
    unknown = [name for name in a.value_of("stop-complete") if name not in COMPLETE_KINDS]
    if unknown:
        kinds = ", ".join(COMPLETE_KINDS)
        a.errors.append(f"stop-complete: {unknown[0][:40]!r}; there are {kinds}")
    a.limit("stop-tokens", len(a.value_of("stop-tokens")), TOKENS_MAX, "tokens")
    text = a.value_of("stop-similarity")
    a.limit("stop-similarity", len(text), SIMILARITY_CHARACTERS_MAX, "characters")
    if text and not text.strip():
        a.errors.append("stop-similarity: the text is blank; leave it empty for off")


def _check_triggers(a: Adjustment) -> None:
    triggers = a.value_of("grammar-triggers")
    tokens = sum(kind == "token" for kind, _ in triggers)
    a.limit("grammar-triggers", tokens, TOKENS_MAX, "tokens")
    if a.value_of("grammar-lazy") and not triggers:
        a.errors.append("grammar-lazy: grammar-triggers are missing, which start the grammar")
    if triggers and a.values.get("grammar-lazy") is False:
        reason = "grammar-lazy is false: the grammar applies from the beginning"
        a.adjust("grammar-triggers", reason, [])
    for name in ("grammar-triggers", "stop-grammar"):
        if a.value_of(name) and not a.has_grammar:
            a.reasons[name] = "it needs a grammar"
    if a.value_of("structural-tag"):
        if a.value_of("grammar-triggers"):
            a.errors.append("structural-tag: it has its own triggers; leave out grammar-triggers")
        if a.value_of("stop-grammar"):
            a.adjust("stop-grammar", "the text of structural-tag may always end", False)


STOPPING_RULES: tuple[Rule, ...] = (_check_patterns, _check_stops, _check_triggers)
"""The rules of `adjust_parameters` on stop conditions and grammar triggers."""

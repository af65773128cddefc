"""Parameters of sampling and of stop conditions, and the adjustment of values that contradict each
other.

The end mark, stop texts and bounds on length are not among the stop conditions. The triggers of
lazy grammars are checked here, too, because they are patterns like stop patterns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from ..errors import InvalidArgument
from ..incremental_regex import STEPS_MAX, WEIGHT_MAX, Pattern
from .chat_options import tool_choice_of
from .fitting import Adjustment, Rule, fields_of
from .other_runtimes import REASONS_MAX
from .parameter_table import (
    BY_NAME,
    DRY_BREAKERS,
    FORMATS,
    NOT_KEPT_TOKENS,
    PARAMETERS_HINT,
    SAMPLERS_DEFAULT,
)

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


_BREAKERS_MAX, _BREAKER_CHARACTERS_MAX = 8, 40
"""Each breaker takes 12 ms in the creation of a sampler with 262k tokens (Gemma); the engine waits
meanwhile.
"""
_GRAMMAR_NESTING_MAX = 100
"""The parser of GBNF recurses for each open bracket."""
_INFILL_TOP_K_MAX = 1000
"""Infill compares every candidate with every other; with 49k of them a token takes minutes."""
_NOT_A_BRACKET = re.compile(r"[^()]")
"""Brackets in quotes are counted too, which at worst refuses a grammar with very many."""
FORMAT_FIELDS = tuple(name.replace("-", "_") for name in FORMATS)
"""The fields of `SamplingParams` that `FORMATS` names."""
GRAMMAR_FIELDS = (
    *FORMAT_FIELDS,
    *("grammar_triggers", "json_whitespace", "schema_infer", "schema_lenient"),
)
"""The fields of `SamplingParams` that determine the grammar of an answer."""
Bias = tuple[int | str, float | bool]
"""A token or a text, and a number to add to its logits; False if it must never be sampled."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling of a turn's tokens. A `temp` of 0 is greedy; `seed` is never -1 here."""

    seed: int = 0
    samplers: tuple[str, ...] = SAMPLERS_DEFAULT
    temp: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    last_n_penalty: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    logit_bias: tuple[Bias, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    grammar_triggers: tuple[tuple[str, str | int], ...] = ()
    """Pairs of (kind, value) that start the grammar; without any it applies from the beginning."""
    json_schema: str = ""
    json_whitespace: str = "spaced"
    schema_infer: str = "closed"
    schema_lenient: bool = False
    lark: str = ""
    regex: str = ""
    structural_tag: str = ""
    """The JSON text of `StructuralTags`."""
    jump_forward: bool = True
    n_probs: int = 0
    post_sampling_probs: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        """The values of `FORMATS`, at most one of which is not empty."""
        return tuple(getattr(self, field) for field in FORMAT_FIELDS)

    @property
    def has_grammar(self) -> bool:
        """Whether the answer follows a grammar, given in one of the formats."""
        return any(self.formats)


def sampling_params(values: Mapping[str, Any], seed: int) -> SamplingParams:
    """Return the sampling part of *values* (by parameter name) with *seed*, which is not -1."""
    return SamplingParams(**{**fields_of(SamplingParams, values), "seed": seed})


def without_grammar(params: SamplingParams) -> SamplingParams:
    """Return *params* without the grammar of the answer."""
    return msgspec.structs.replace(params, **dict.fromkeys(FORMAT_FIELDS, ""), grammar_triggers=())


def adjust_parameters(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return *values* without contradictions, and for each parameter adjusted the reason.

    The rules are llama-server's (`tools/server/server-task.cpp`, `common/sampling.cpp`).

    :raises InvalidArgument: some contradictions cannot be resolved; the error reports all of these.
    """
    adjustment = Adjustment(values)
    for rule in _RULES:
        rule(adjustment)
    if adjustment.errors:
        errors = adjustment.errors
        raise InvalidArgument("; ".join(errors), hint=PARAMETERS_HINT, data={"errors": errors})
    return adjustment.values, adjustment.reasons


def leave_out_unknown_biases(values: dict[str, Any], vocab_size: int) -> dict[str, str]:
    """Remove biases of tokens outside the vocabulary from *values*, as they have no effect. Return
    by parameter the reason.
    """
    name = "logit-bias"
    biases = values.get(name, ())
    known = range(vocab_size)
    unknown = [token for token, _ in biases if isinstance(token, int) and token not in known]
    if not unknown:
        return {}
    left_out = set(unknown)
    values[name] = [pair for pair in biases if pair[0] not in left_out]
    shown = ", ".join(map(str, unknown[:REASONS_MAX]))
    more = f" and {len(unknown) - REASONS_MAX} more" if len(unknown) > REASONS_MAX else ""
    return {name: f"tokens outside the vocabulary of {vocab_size}: {shown}{more}"}


def _limit_mirostat_chain(a: Adjustment) -> None:
    if not a.value_of("mirostat"):
        return
    if "samplers" in a.values:
        a.reasons["samplers"] = (
            "mirostat replaces the samplers; only the temperature applies before it"
        )
    a.values["samplers"] = ["temperature"]


def _check_breakers(a: Adjustment) -> None:
    name = "dry-sequence-breakers"
    breakers = a.value_of(name)
    if not breakers:
        a.errors.append(f"{name}: an empty list; name at least one text")
    a.limit(name, max(map(len, breakers), default=0), _BREAKER_CHARACTERS_MAX, "characters")
    a.limit(name, len(breakers), _BREAKERS_MAX, "texts")


def _check_infill(a: Adjustment) -> None:
    names, top_k, most = a.value_of("samplers"), a.value_of("top-k"), _INFILL_TOP_K_MAX
    if "infill" not in names:
        return
    if "top-k" not in names[: names.index("infill")] or not 0 < top_k <= most:
        a.errors.append(f"samplers: infill needs top-k before it, with 1 … {most} tokens")


def _end_with_grammar(a: Adjustment) -> None:
    for name, reason in (
        ("ignore-eos", "the answer ends where its grammar is complete"),
        ("ctx-shift", "an answer with a grammar keeps its beginning"),
    ):
        if a.has_grammar and a.value_of(name):
            a.adjust(name, reason, False)


def _limit_kept_tokens(a: Adjustment) -> None:
    ctx_size, n_keep = a.value_of("ctx-size"), a.value_of("n-keep")
    most = max(1, ctx_size - NOT_KEPT_TOKENS)
    if ctx_size and n_keep > most:
        a.adjust("n-keep", f"{n_keep} exceed a context of {ctx_size} tokens: {most} are kept", most)


def _check_grammar(a: Adjustment) -> None:
    first, *others = [name for name in FORMATS if a.value_of(name)] or [""]
    a.errors += [f'{first}: {other} is set too; set one of them to ""' for other in others]
    brackets = _NOT_A_BRACKET.sub("", a.value_of("grammar"))
    depths = accumulate(1 if bracket == "(" else -1 for bracket in brackets)
    a.limit("grammar", max(depths, default=0), _GRAMMAR_NESTING_MAX, "brackets are open at once")


def _check_tool_choice(a: Adjustment) -> None:
    choice = tool_choice_of(a.value_of("tool-choice"))
    names = [tool["function"]["name"] for tool in a.value_of("tools")]
    if choice.mode != "required" and not choice.names:
        return
    unknown = [name for name in choice.names if name not in names]
    if not names:
        a.reasons["tool-choice"] = "the turn has no tools"
    elif unknown:
        a.errors.append(f"tool-choice: no tool is named {unknown[0]!r}")
    elif a.has_grammar and choice.mode == "required":
        a.errors.append("tool-choice: a required call has its own grammar; leave out the other one")


REASONING_MESSAGE_CHARACTERS_MAX = 1024
REASONING_BOUNDS = ("reasoning-budget", "reasoning-effort", "reasoning-efforts")
"""The parameters that bound a thought."""


def reasoning_budget(values: Mapping[str, Any]) -> int:
    """Return the most tokens of a thought that the `REASONING_BOUNDS` in *values* allow; -1: no
    limit.
    """
    budget, effort, efforts = (values[name] for name in REASONING_BOUNDS)
    limits = [number for number in (budget, efforts.get(effort, -1)) if number >= 0]
    return min(limits, default=-1)


def _check_reasoning(a: Adjustment) -> None:
    name, most = "reasoning-budget-message", REASONING_MESSAGE_CHARACTERS_MAX
    a.limit(name, len(a.value_of(name)), most, "characters")


def _raise_dry_base(a: Adjustment) -> None:
    if a.value_of("dry-base") < 1:
        reason = "below 1 the penalty would shrink: 1.75 is used"
        a.adjust("dry-base", reason, BY_NAME["dry-base"].default)


def _report_unused(a: Adjustment) -> None:
    for name in ("json-whitespace", "schema-lenient"):
        if a.value_of(name) != BY_NAME[name].default and not a.value_of("json-schema"):
            a.reasons[name] = "it needs a json-schema"
    if a.value_of("schema-infer") != BY_NAME["schema-infer"].default and not any(
        map(a.value_of, ("json-schema", "lark", "structural-tag", "tools"))
    ):
        a.reasons["schema-infer"] = "it needs a format with a schema, or tools"
    if a.value_of("prediction") and a.value_of("speculation") == "off":
        a.reasons["prediction"] = "speculation is off"
    if a.value_of("adaptive-target") >= 0 and "adaptive-p" not in a.value_of("samplers"):
        a.reasons["adaptive-target"] = "adaptive-p is not among the samplers: name it there"
    if a.value_of("xtc-probability") > 0 and a.value_of("xtc-threshold") > 0.5:
        a.reasons["xtc-threshold"] = "no two tokens can be above 0.5: xtc is off"


_RULES: tuple[Rule, ...] = (
    _limit_mirostat_chain,
    _check_breakers,
    _check_reasoning,
    _check_infill,
    _end_with_grammar,
    _limit_kept_tokens,
    _check_grammar,
    _check_tool_choice,
    _raise_dry_base,
    _report_unused,
    *STOPPING_RULES,
)

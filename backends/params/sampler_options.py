"""Sampling parameters, and the adjustment of values that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import InvalidArgument
from .stop_options import STOPPING_RULES, Rule, value_of
from .table import BY_NAME, DRY_BREAKERS, SAMPLERS_DEFAULT

_BREAKERS_MAX, _BREAKER_CHARACTERS_MAX = 8, 40
"""Creating a sampler with one takes 12 ms with 262k tokens (Gemma); the engine waits meanwhile."""
_GRAMMAR_NESTING_MAX = 100
"""llama.cpp's parser recurses for each open bracket."""
_INFILL_TOP_K_MAX = 1000
"""Infill compares every token with every other: with 49k of them a token takes minutes."""
_NOT_A_BRACKET = re.compile(r"[^()]")
"""Brackets in quotes are counted too, which at worst refuses a grammar with very many."""
Bias = tuple[int | str, float | bool]
"""A token or a text, and a number to add to its logits; False: it is never sampled."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a turn are sampled. `temp` 0 is greedy; `seed` is never -1 here."""

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
    """Pairs of (kind, value) that start the grammar; empty: it applies from the beginning."""
    json_schema: str = ""
    n_probs: int = 0
    post_sampling_probs: bool = False

    @property
    def has_grammar(self) -> bool:
        """Whether the answer follows a grammar, given as such or as a schema."""
        return bool(self.grammar or self.json_schema)


_FIELDS = {f: f.replace("_", "-") for f in SamplingParams.__struct_fields__}


def sampling_params(values: Mapping[str, Any], seed: int) -> SamplingParams:
    """Return the sampling part of *values* (by parameter name) with *seed*, which is not -1."""
    fields = {f: _frozen(values[n]) for f, n in _FIELDS.items() if n in values}
    return SamplingParams(**{**fields, "seed": seed})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def adjust_parameters(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return *values* without contradictions, and for each parameter adjusted the reason.

    The rules are llama-server's (`tools/server/server-task.cpp`, `common/sampling.cpp`).

    :raises InvalidArgument: contradictions cannot be resolved; the error reports all of them.
    """
    result, adjusted, errors = dict(values), dict[str, str](), list[str]()
    for rule in _RULES:
        rule(result, adjusted, errors)
    if errors:
        raise InvalidArgument("; ".join(errors), data={"errors": errors})
    return result, adjusted


def _limit_mirostat_chain(values: dict[str, Any], adjusted: dict[str, str], _: list[str]) -> None:
    if not value_of(values, "mirostat"):
        return
    if "samplers" in values:
        adjusted["samplers"] = "mirostat samples: the chain is only the temperature"
    values["samplers"] = ["temperature"]


def _check_breakers(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    breakers = value_of(values, "dry-sequence-breakers")
    if not breakers:
        errors.append("dry-sequence-breakers: an empty list; name at least one text")
    longest = max((len(b) for b in breakers), default=0)
    if longest > _BREAKER_CHARACTERS_MAX:
        most = f"{_BREAKER_CHARACTERS_MAX} at most"
        errors.append(f"dry-sequence-breakers: a text of {longest} characters; {most}")
    if len(breakers) > _BREAKERS_MAX:
        errors.append(f"dry-sequence-breakers: {len(breakers)} texts; {_BREAKERS_MAX} at most")


def _check_infill(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    names, top_k, most = value_of(values, "samplers"), value_of(values, "top-k"), _INFILL_TOP_K_MAX
    if "infill" not in names:
        return
    if "top-k" not in names[: names.index("infill")] or not 0 < top_k <= most:
        errors.append(f"samplers: infill needs top-k before it, with 1 … {most} tokens")


def _end_with_grammar(values: dict[str, Any], adjusted: dict[str, str], _: list[str]) -> None:
    if not (value_of(values, "grammar") or value_of(values, "json-schema")):
        return
    for name, reason in (
        ("ignore-eos", "the answer ends where its grammar is complete"),
        ("ctx-shift", "an answer with a grammar keeps its beginning"),
    ):
        if value_of(values, name):
            adjusted[name], values[name] = reason, False


def _check_grammar(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    grammar = value_of(values, "grammar")
    if grammar and value_of(values, "json-schema"):
        errors.append('json-schema: grammar is set too; set one of them to ""')
    depth = deepest = 0
    for bracket in _NOT_A_BRACKET.sub("", grammar):
        depth += (bracket == "(") - (bracket == ")")
        deepest = max(deepest, depth)
    if deepest > _GRAMMAR_NESTING_MAX:
        most = f"{_GRAMMAR_NESTING_MAX} at most"
        errors.append(f"grammar: {deepest} brackets are open at once; {most}")


def _raise_dry_base(values: dict[str, Any], adjusted: dict[str, str], _: list[str]) -> None:
    if value_of(values, "dry-base") < 1:
        adjusted["dry-base"] = "below 1 the penalty would shrink: 1.75 is used"
        values["dry-base"] = BY_NAME["dry-base"].default


def _report_unused(values: dict[str, Any], adjusted: dict[str, str], _: list[str]) -> None:
    target, samplers = value_of(values, "adaptive-target"), value_of(values, "samplers")
    if target >= 0 and "adaptive-p" not in samplers:
        adjusted["adaptive-target"] = "adaptive-p is not among the samplers: name it there"
    if value_of(values, "xtc-probability") > 0 and value_of(values, "xtc-threshold") > 0.5:
        adjusted["xtc-threshold"] = "no two tokens can be above 0.5: xtc is off"


_RULES: tuple[Rule, ...] = (
    _limit_mirostat_chain,
    _check_breakers,
    _check_infill,
    _end_with_grammar,
    _check_grammar,
    _raise_dry_base,
    _report_unused,
    *STOPPING_RULES,
)

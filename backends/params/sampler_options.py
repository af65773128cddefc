"""From parameters to what a sampler is made of; what contradicts itself is settled, and told."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..errors import InvalidArgument
from .stop_options import STOPPING_RULES
from .table import BY_NAME, DRY_BREAKERS, SAMPLERS_DEFAULT

_BREAKERS, _BREAKER_CHARACTERS = 8, 40
"""Making a sampler with one takes 12 ms with 262k tokens (Gemma): the engine stands meanwhile."""
_GRAMMAR_NESTING = 100
"""llama.cpp's parser calls itself for each bracket that is open."""
_INFILL_TOP_K = 1000
"""Infill compares every token with every other: with 49k of them a token takes minutes."""
_BRACKETS = re.compile(r"[^()]")
"""All but round brackets; those in quotes are counted, too: too many are refused at worst."""
Bias = tuple[int | str, float | bool]
"""A token or a text, and what its logits get more; False: it is never drawn."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of a turn are drawn. `temp` 0 is greedy; `seed` is never -1 here."""

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
    """What wakes the grammar: (kind, value); none: it holds from the beginning."""
    json_schema: str = ""
    n_probs: int = 0
    post_sampling_probs: bool = False

    @property
    def follows(self) -> bool:
        """Tell whether the answer follows a grammar, of a client's or of a schema's making."""
        return bool(self.grammar or self.json_schema)


_FIELDS = {f: f.replace("_", "-") for f in SamplingParams.__struct_fields__}


def sampling_params(values: Mapping[str, Any], seed: int) -> SamplingParams:
    """Return the sampling part of *values* (by parameter name), with a *seed* already drawn."""
    fields = {f: _frozen(values[n]) for f, n in _FIELDS.items() if n in values}
    return SamplingParams(**{**fields, "seed": seed})


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def settle(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return *values* as they hold together, and by name why one is not as it was asked for.

    The rules are those of llama-server (`tools/server/server-task.cpp`, `common/sampling.cpp`).

    :raises InvalidArgument: they cannot hold together; all that is wrong is told at once.
    """
    settled, told, errors = dict(values), dict[str, str](), list[str]()
    for rule in _RULES:
        rule(settled, told, errors)
    if errors:
        raise InvalidArgument("; ".join(errors), data={"errors": errors})
    return settled, told


Rule = Callable[[dict[str, Any], dict[str, str], list[str]], None]


def _get(values: Mapping[str, Any], name: str) -> Any:
    return values.get(name, BY_NAME[name].default)


def _mirostat_draws_alone(values: dict[str, Any], told: dict[str, str], _: list[str]) -> None:
    if not _get(values, "mirostat"):
        return
    if "samplers" in values:
        told["samplers"] = "mirostat draws: the chain is the temperature alone"
    values["samplers"] = ["temperature"]


def _breakers_are_few(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    breakers = _get(values, "dry-sequence-breakers")
    if not breakers:
        errors.append("dry-sequence-breakers: an empty list; name one text at least")
    longest = max((len(b) for b in breakers), default=0)
    if longest > _BREAKER_CHARACTERS:
        most = f"{_BREAKER_CHARACTERS} at most"
        errors.append(f"dry-sequence-breakers: a text of {longest} characters; {most}")
    if len(breakers) > _BREAKERS:
        errors.append(f"dry-sequence-breakers: {len(breakers)} texts; {_BREAKERS} at most")


def _infill_sees_few(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    names, top_k = _get(values, "samplers"), _get(values, "top-k")
    if "infill" not in names:
        return
    if "top-k" not in names[: names.index("infill")] or not 0 < top_k <= _INFILL_TOP_K:
        errors.append(f"samplers: infill needs top-k before it, with 1 … {_INFILL_TOP_K} tokens")


def _grammar_ends_the_answer(values: dict[str, Any], told: dict[str, str], _: list[str]) -> None:
    if not (_get(values, "grammar") or _get(values, "json-schema")):
        return
    if _get(values, "ignore-eos"):
        told["ignore-eos"] = "the answer ends where its grammar is complete"
        values["ignore-eos"] = False
    if _get(values, "ctx-shift"):
        told["ctx-shift"] = "the answer to a grammar keeps its beginning"
        values["ctx-shift"] = False


def _grammar_is_one(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    if _get(values, "grammar") and _get(values, "json-schema"):
        errors.append('json-schema: there is a grammar, too; set one of both to ""')


def _grammar_is_flat(values: dict[str, Any], _: dict[str, str], errors: list[str]) -> None:
    depth = deepest = 0
    for bracket in _BRACKETS.sub("", _get(values, "grammar")):
        depth += (bracket == "(") - (bracket == ")")
        deepest = max(deepest, depth)
    if deepest > _GRAMMAR_NESTING:
        errors.append(f"grammar: {deepest} brackets are open at once; {_GRAMMAR_NESTING} at most")


def _dry_grows(values: dict[str, Any], told: dict[str, str], _: list[str]) -> None:
    if _get(values, "dry-base") < 1:
        told["dry-base"] = "below 1 it would shrink: 1.75 holds"
        values["dry-base"] = BY_NAME["dry-base"].default


def _adaptive_p_is_in_the_chain(values: dict[str, Any], told: dict[str, str], _: list[str]) -> None:
    if _get(values, "adaptive-target") >= 0 and "adaptive-p" not in _get(values, "samplers"):
        told["adaptive-target"] = "adaptive-p is not among the samplers: name it there"


def _xtc_is_on(values: dict[str, Any], told: dict[str, str], _: list[str]) -> None:
    if _get(values, "xtc-probability") > 0 and _get(values, "xtc-threshold") > 0.5:
        told["xtc-threshold"] = "above 0.5 no two tokens reach it: xtc is off"


_RULES: tuple[Rule, ...] = (
    _mirostat_draws_alone,
    _breakers_are_few,
    _infill_sees_few,
    _grammar_ends_the_answer,
    _grammar_is_one,
    _grammar_is_flat,
    _dry_grows,
    _adaptive_p_is_in_the_chain,
    _xtc_is_on,
    *STOPPING_RULES,
)

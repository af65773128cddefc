"""The table of parameters that a client or a configuration can set, and how they are read.

One row a parameter: its name (llama.cpp's, with hyphens), other spellings, type, range, level.
`read_options` turns a JSON object of a wasi-nn call into values; `_` and `-` are the same.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from reprlib import repr as shorten
from typing import Any, Literal

import msgspec

from .errors import InvalidArgument, InvalidEncoding

__all__ = (
    "BY_NAME",
    "PARAMETERS",
    "Options",
    "Parameter",
    "SamplingParams",
    "nearest",
    "parse_json_options",
    "read_options",
    "sampling_params",
)

Level = Literal["model", "context", "request"]
KEY_CHARACTERS_MAX = 100
"""A longer key is nobody's slip: it is shortened in messages and compared with none."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens of a turn are drawn. `temp` 0 is greedy; `seed` is never -1 here."""

    seed: int = 0
    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typ_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    last_n_penalty: int = 64
    ignore_eos: bool = False


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `low` and `high` bound numbers, both inclusive."""

    name: str
    kind: type[Any]
    level: Level
    default: Any
    doc: str
    low: float = -math.inf
    high: float = math.inf
    aliases: tuple[str, ...] = ()


class Options(msgspec.Struct, kw_only=True):
    """What was read from a JSON object: values by parameter name, and the keys set aside."""

    values: dict[str, Any] = {}
    ignored: list[str] = []

    def level(self, *levels: Level) -> dict[str, Any]:
        """Return the values that belong to one of *levels*."""
        return {k: v for k, v in self.values.items() if BY_NAME[k].level in levels}


def _row(
    name: str,
    kind: type[Any],
    level: Level,
    default: Any,
    doc: str,
    *aliases: str,
    low: float = -math.inf,
    high: float = math.inf,
) -> Parameter:
    return Parameter(
        name=name,
        kind=kind,
        level=level,
        default=default,
        doc=doc,
        low=low,
        high=high,
        aliases=aliases,
    )


PARAMETERS: tuple[Parameter, ...] = (
    _row("ctx-size", int, "model", 0, "tokens of one session's context; 0: the model's own, at most 4096", "n-ctx", low=0, high=1 << 24),
    _row("batch-size", int, "model", 512, "rows of one step, at most", "n-batch", low=16, high=8192),
    _row("threads", int, "model", 0, "threads of a step; 0: the cores of the configuration", "n-threads", low=0, high=512),
    _row("n-gpu-layers", int, "model", 0, "layers that run on the GPU", "gpu-layers", "ngl", low=-1, high=100_000),
    _row("slots", int, "model", 4, "sequences decoded side by side", "n-parallel", "parallel", low=1, high=256),
    _row("keep-alive", float, "model", None, "seconds that the model stays when nobody uses it; -1: until memory is short", low=-1, high=2_592_000),
    _row("append", bool, "context", False, "set_input(0) adds to the history instead of replacing it"),
    _row("n-predict", int, "request", -1, "tokens to generate, at most; -1: what the context has left", "max-tokens", "max-completion-tokens", low=-1, high=1 << 24),
    _row("stop", list, "request", [], "texts that end the turn; cut from the output"),
    _row("reverse-prompt", list, "request", [], "texts that end the turn; kept in the output", "antiprompt"),
    _row("seed", int, "request", -1, "seed of the generator; -1: a random one, told in the metadata", low=-1, high=(1 << 32) - 1),
    _row("temp", float, "request", 0.8, "temperature; 0 is greedy", "temperature", low=0, high=100),
    _row("top-k", int, "request", 40, "keep the k likeliest tokens; 0: all", low=0, high=1 << 24),
    _row("top-p", float, "request", 0.95, "keep the likeliest tokens up to this probability", low=0, high=1),
    _row("min-p", float, "request", 0.05, "drop tokens below this share of the likeliest one", low=0, high=1),
    _row("typ-p", float, "request", 1.0, "locally typical sampling; 1 is off", "typical-p", "typical", low=0, high=1),
    _row("repeat-penalty", float, "request", 1.0, "penalty of tokens seen; 1 is off", "repetition-penalty", low=0.01, high=100),
    _row("presence-penalty", float, "request", 0.0, "penalty of tokens seen at all", low=-100, high=100),
    _row("frequency-penalty", float, "request", 0.0, "penalty of tokens by their count", low=-100, high=100),
    _row("last-n-penalty", int, "request", 64, "tokens that the penalties look back on", "repeat-last-n", "penalty-last-n", low=0, high=1 << 24),
    _row("ctx-shift", bool, "request", False, "a full context drops old tokens and goes on (approximate)", "context-shift"),
    _row("n-keep", int, "request", 0, "tokens at the start that ctx-shift keeps; -1: the whole prompt", "keep", low=-1, high=1 << 24),
    _row("n-discard", int, "request", 0, "tokens that ctx-shift drops at once; 0: half of what it may", low=0, high=1 << 24),
    _row("cache-reuse", int, "request", 0, "shortest run of equal tokens that is reused by shifting (approximate); 0: off", "n-cache-reuse", low=0, high=1 << 24),
    _row("ignore-eos", bool, "request", False, "go on after the end of generation"),
)  # fmt: skip

BY_NAME: dict[str, Parameter] = {p.name: p for p in PARAMETERS}
_BY_ALIAS: dict[str, Parameter] = {a: p for p in PARAMETERS for a in (p.name, *p.aliases)}
_SECTIONS = ("model", "sampling", "stopping")
"""Nested forms of apuslabs/wasi_nn_backend: their keys are read as if they stood at the top."""


def nearest(key: str, known: Any) -> str:
    """Return a clause that names the known key nearest to *key*, or an empty text."""
    if len(key) > KEY_CHARACTERS_MAX:
        return ""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def parse_json_options(text: bytes | str, *, strict: bool = False) -> Options:
    """Read the JSON text of a wasi-nn call; empty text is an empty object.

    :raises InvalidEncoding: it is no JSON object.
    :raises InvalidArgument: a value is wrong, or, with strict, a key is unknown.
    """
    if not text.strip():
        return Options()
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidEncoding(
            f"the metadata is no valid JSON: {exc}", hint='send one JSON object, such as {"temp":0}'
        ) from None
    if not isinstance(value, dict):
        raise InvalidEncoding(
            f"the metadata is a JSON {type(value).__name__}, not an object",
            hint='send one JSON object, such as {"temp":0}',
        )
    return read_options(value, strict=strict)


def read_options(raw: Mapping[str, Any], *, strict: bool = False) -> Options:
    """Read parameters from a decoded object; unknown keys are set aside under `ignored`.

    All errors are reported together, each with key, value and range.

    :raises InvalidArgument: a value is wrong, or, with strict (or ``"strict": true``), unknown.
    """
    options = Options()
    errors: list[str] = []
    flat = _flatten(raw)
    strict = strict or flat.pop("strict", False) is True
    for key, value in flat.items():
        if value is None:
            continue
        parameter = _BY_ALIAS.get(key.lower().replace("_", "-"))
        if parameter is not None:
            _read_one(parameter, key, value, options.values, errors)
        elif strict:
            known = nearest(key, _BY_ALIAS)
            errors.append(f"unknown key {key[:KEY_CHARACTERS_MAX]!r} {known}".rstrip())
        else:
            options.ignored.append(key[:KEY_CHARACTERS_MAX])
    if errors:
        raise InvalidArgument("; ".join(errors), data={"errors": errors})
    return options


def _flatten(raw: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            flat.update({str(k): v for k, v in value.items()})
        else:
            flat[str(key)] = value
    return flat


def _read_one(
    parameter: Parameter, key: str, value: Any, values: dict[str, Any], errors: list[str]
) -> None:
    try:
        values[parameter.name] = _convert(parameter, value)
    except ValueError as exc:
        errors.append(f"{key}: {exc}")


def _convert(parameter: Parameter, value: Any) -> Any:
    kind = parameter.kind
    if kind is list:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(i, str) for i in items):
            raise ValueError(f"{shorten(value)} is no text and no list of texts")
        return [i for i in items if i]
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{shorten(value)} is neither true nor false")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{shorten(value)} is no number")
    if kind is int and value != int(value if math.isfinite(value) else 0):
        raise ValueError(f"{shorten(value)} is no whole number")
    if not parameter.low <= value <= parameter.high:
        good = min(max(value, parameter.low), parameter.high) if value == value else parameter.low
        raise ValueError(
            f"{shorten(value)} is outside {parameter.low:g} … {parameter.high:g}; nearest: {good:g}"
        )
    return kind(value)


def sampling_params(values: Mapping[str, Any], seed: int) -> SamplingParams:
    """Return the sampling part of *values* (by parameter name), with a *seed* already drawn."""
    fields = {
        f: values[f.replace("_", "-")]
        for f in SamplingParams.__struct_fields__
        if f.replace("_", "-") in values
    }
    return SamplingParams(**{**fields, "seed": seed})

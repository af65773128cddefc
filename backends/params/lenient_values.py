"""Values out of their range in the JSON of wasi-nn calls, replaced by values that are used instead.

Guests cannot read the message of an error, and other runtimes accept these values.
"""

from __future__ import annotations

from typing import Any

from ..shorten import plain_number, shorten
from .parameter_table import Parameter

_SEEDS = 1 << 32
_POOLING_NUMBERS = {-1: "", 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
"""`enum llama_pooling_type`."""


def adjust_value(parameter: Parameter, value: Any) -> tuple[Any, str]:
    """Return the value that is used for *value*, and the reason if it is another one. A value of
    another type is returned as it is.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value, ""
    if parameter.name == "pooling":
        return _named_pooling(value)
    if parameter.kind not in ("int", "float") or parameter.low <= value <= parameter.high:
        return value, ""
    if parameter.name == "n-predict" and value == -2:
        return -1, "-2 means until the context is full: -1 is used"
    if parameter.name == "seed" and value == value // 1:
        seed = int(value) % _SEEDS
        return seed, f"{shorten(value)} is outside 0 … {_SEEDS - 1}: {seed} is used, modulo 2^32"
    low, high = plain_number(parameter.low), plain_number(parameter.high)
    used = parameter.low if value < parameter.low else parameter.high
    number = int(used) if parameter.kind == "int" else used
    reason = f"{shorten(value)} is outside {low} … {high}: {plain_number(used)} is used"
    return number, reason


def _named_pooling(value: float) -> tuple[Any, str]:
    if value not in _POOLING_NUMBERS:
        return value, ""
    name = _POOLING_NUMBERS[int(value)]
    return name, f"{int(value)} means {name or 'the default'}"

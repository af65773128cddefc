"""Reading of values that have a number for each item: biases, shares of devices, adapter scales.

A number out of its range is refused, or with a `Clamp` replaced by the nearest valid one.
"""

from __future__ import annotations

import re
from typing import Any

from ..model_spec import ADAPTERS_MAX, SCALE_MAX, is_scale
from ..texts import plain_number, shorten
from .fitting import as_whole
from .other_runtimes import Clamp, read_token
from .parameter_table import TENSOR_SPLIT_MAX

BIASES_MAX = 2500
"""Pairs of `logit-bias`. Each adds 3 us to the time until its turn is submitted."""
BIAS_HIGH = 1e6
SHARE_HIGH = 1e6
LIST_CHARACTERS_MAX = 1000
"""Characters of a text that stands for a short list."""


def read_biases(value: Any, clamp: Clamp | None = None) -> list[list[Any]]:
    """Return pairs of a token or text and its bias, or raise ValueError."""
    pairs = [[_bias_key(k), v] for k, v in value.items()] if isinstance(value, dict) else value
    if not isinstance(pairs, list):
        raise ValueError(f"{shorten(value)} is neither a list of pairs nor a map")
    if len(pairs) > BIASES_MAX:
        raise ValueError(f"{len(pairs)} items; {BIASES_MAX} at most")
    return [_bias(pair, clamp) for pair in pairs]


def _bias_key(key: Any) -> Any:
    """Return a map's key, as a number if it is one, because keys are always texts in JSON."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() else key


def _bias(pair: Any, clamp: Clamp | None) -> list[Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"{shorten(pair)} is not a pair of a token or text and a number or false")
    token, bias = pair
    if not token or not isinstance(token, str):
        token = _biased_token(token)
    if bias is False:
        return [token, False]
    if not is_number(bias) or bias != bias:
        raise ValueError(f"{shorten(bias)} is neither a number nor false")
    if abs(bias) > BIAS_HIGH:
        if clamp is None:
            raise ValueError(f"{shorten(bias)} is outside -1000000 … 1000000; use false for never")
        bias = clamp(f"the bias of {shorten(token)}", bias, -BIAS_HIGH, BIAS_HIGH)
    return [token, float(bias)]


def _biased_token(value: Any) -> int:
    """Return a token's number. A negative one, such as llama.cpp's -1 for no token, is outside each
    vocabulary, and has no effect.
    """
    token = as_whole(value)
    if isinstance(token, int) and not isinstance(token, bool) and -1 << 31 <= token < 0:
        return token
    return read_token(token)


def read_shares(value: Any, clamp: Clamp | None = None) -> list[float]:
    """Read a list of numbers, or a text of them in the form of llama.cpp's command line."""
    check_list_text(value)
    parts = value
    if isinstance(value, str):
        parts = re.split(r"[,/]", value) if value.strip() else []
    if not isinstance(parts, list) or len(parts) > TENSOR_SPLIT_MAX:
        raise ValueError(f"{shorten(value)} is not a list of up to {TENSOR_SPLIT_MAX} numbers")
    try:
        numbers = [float(part) for part in parts if not isinstance(part, bool)]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shorten(value)} is not a list of numbers") from None
    if clamp is not None and len(numbers) == len(parts):
        numbers = [_clamped_share(i, n, clamp) for i, n in enumerate(numbers)]
    if len(numbers) < len(parts) or not all(0 <= n <= SHARE_HIGH for n in numbers):
        raise ValueError(f"{shorten(value)}: each number must be in 0 … {plain_number(SHARE_HIGH)}")
    if numbers and not sum(numbers):
        if clamp is None:
            raise ValueError(f"{shorten(value)}: every device has a share of 0")
        clamp.note("every device has a share of 0: the free memory decides")
        return []
    return numbers


def _clamped_share(device: int, share: float, clamp: Clamp) -> float:
    outside = share < 0 or share > SHARE_HIGH
    return clamp(f"device {device}", share, 0.0, SHARE_HIGH) if outside else share


def read_scales(value: Any, clamp: Clamp | None = None) -> list[list[Any]]:
    """Return pairs of a name or index of an adapter and a scale, or raise ValueError.

    *value* is a map, or a list whose items are names (scale 1), pairs, or maps with `scale` and
    either `name` or `id` (as in llama-server: an index from 0, or a name).
    """
    items = [[name, scale] for name, scale in value.items()] if isinstance(value, dict) else value
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, list):
        raise ValueError(f"{shorten(value)} is neither a map of adapters to scales nor a list")
    if len(items) > ADAPTERS_MAX:
        raise ValueError(f"{len(items)} adapters; {ADAPTERS_MAX} at most")
    pairs = [_scale(item, clamp) for item in items]
    check_distinct("adapter", [name for name, _ in pairs])
    return pairs


def _scale(item: Any, clamp: Clamp | None) -> list[Any]:
    if isinstance(item, str):
        item = [item, 1.0]
    elif isinstance(item, dict):
        item = [item.get("name", item.get("id")), item.get("scale", 1.0)]
    if not isinstance(item, list) or len(item) != 2:
        raise ValueError(f"{shorten(item)} is not an adapter with a scale")
    name, scale = as_whole(item[0]), item[1]
    is_index = isinstance(name, int) and not isinstance(name, bool) and name >= 0
    if not is_index and not (isinstance(name, str) and name):
        raise ValueError(f"{shorten(name)} is neither an adapter's name nor its index")
    if clamp is not None and is_number(scale) and abs(scale) > SCALE_MAX:
        scale = clamp(f"scale of {shorten(name)}", scale, -SCALE_MAX, SCALE_MAX)
    if not is_scale(scale):
        bounds = f"{plain_number(-SCALE_MAX)} … {plain_number(SCALE_MAX)}"
        raise ValueError(f"scale of {shorten(name)}: {shorten(scale)} is not a number in {bounds}")
    return [name, float(scale)]


def is_number(value: Any) -> bool:
    """Return whether *value*, which may be of any type, is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_distinct(kind: str, names: list[Any]) -> None:
    """Raise ValueError if a name of the *kind* is in *names* twice."""
    repeated = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if repeated is not None:
        raise ValueError(f"{kind} {shorten(repeated)} is named twice; name each once")


def check_list_text(value: Any) -> None:
    """Raise ValueError if *value* is a text too long to stand for a short list."""
    if isinstance(value, str) and len(value) > LIST_CHARACTERS_MAX:
        raise ValueError(f"a text of {len(value)} characters; {LIST_CHARACTERS_MAX} at most")

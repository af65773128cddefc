"""Reading the choice of adapters: names, or places in the model's list, with a scale each."""

from __future__ import annotations

from reprlib import repr as shorten
from typing import Any

from ..adapter_keys import ADAPTERS_MAX, SCALE_MAX, is_scale


def read_scales(value: Any) -> list[list[Any]]:
    """Return pairs of a name or place and a scale.

    Of a map, or a list; its items are names (scale 1), pairs, or maps with `id` (as llama-server
    has it: a place from 0, or a name) or `name`, and `scale`.

    :raises ValueError: it is none of these, or a scale is out of its range.
    """
    items = [[name, scale] for name, scale in value.items()] if isinstance(value, dict) else value
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, list):
        raise ValueError(f"{shorten(value)} is no map of adapters to scales and no list")
    if len(items) > ADAPTERS_MAX:
        raise ValueError(f"{len(items)} adapters; {ADAPTERS_MAX} at most")
    pairs = [_pair(item) for item in items]
    names = [which for which, _ in pairs]
    twice = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if twice is not None:
        raise ValueError(f"adapter {shorten(twice)} is there twice; name each once")
    return pairs


def _pair(item: Any) -> list[Any]:
    if isinstance(item, str):
        item = [item, 1.0]
    elif isinstance(item, dict):
        item = [item.get("name", item.get("id")), item.get("scale", 1.0)]
    if not isinstance(item, list) or len(item) != 2:
        raise ValueError(f"{shorten(item)} is no adapter with a scale")
    which, scale = item
    named = isinstance(which, str) and which
    if not named and (isinstance(which, bool) or not isinstance(which, int) or which < 0):
        raise ValueError(f"{shorten(which)} is no adapter's name and no place in their list")
    if not is_scale(scale):
        bounds = f"{-SCALE_MAX:g} … {SCALE_MAX:g}"
        raise ValueError(f"the scale {shorten(scale)} of {shorten(which)} is no number in {bounds}")
    return [which, float(scale)]

"""Reading of adapter scales: a name, or an index in the model's list, with a scale for each."""

from __future__ import annotations

from typing import Any

from ..adapter_keys import ADAPTERS_MAX, SCALE_MAX, is_scale
from ..shorten import plain_number, shorten


def read_scales(value: Any) -> list[list[Any]]:
    """Return pairs of a name or index and a scale, or raise ValueError.

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
    pairs = [_pair(item) for item in items]
    check_distinct("adapter", [name for name, _ in pairs])
    return pairs


def check_distinct(kind: str, names: list[Any]) -> None:
    """Raise ValueError if *names*, each of a *kind*, has one of them twice."""
    repeated = next((n for i, n in enumerate(names) if n in names[:i]), None)
    if repeated is not None:
        raise ValueError(f"{kind} {shorten(repeated)} is there twice; name each once")


def _pair(item: Any) -> list[Any]:
    if isinstance(item, str):
        item = [item, 1.0]
    elif isinstance(item, dict):
        item = [item.get("name", item.get("id")), item.get("scale", 1.0)]
    if not isinstance(item, list) or len(item) != 2:
        raise ValueError(f"{shorten(item)} is not an adapter with a scale")
    name, scale = item
    is_index = isinstance(name, int) and not isinstance(name, bool) and name >= 0
    if not is_index and not (isinstance(name, str) and name):
        raise ValueError(f"{shorten(name)} is neither an adapter's name nor its index")
    if not is_scale(scale):
        bounds = f"{plain_number(-SCALE_MAX)} … {plain_number(SCALE_MAX)}"
        raise ValueError(f"scale of {shorten(name)}: {shorten(scale)} is not a number in {bounds}")
    return [name, float(scale)]

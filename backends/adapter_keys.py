"""LoRA adapters of a model, and the keys by which a step selects them.

A *key* combines an adapter's id, a hash of its file, with a scale. Tasks and KV states with equal
sorted keys were computed with the same adapters, whatever names these have.
"""

from __future__ import annotations

import msgspec

ADAPTERS_MAX = 64
"""Adapters per model."""
SCALE_MAX = 100.0
"""Scales are in −100 … 100."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to load: its file, and the name by which requests choose it.

    *scale* applies to requests that choose no adapters; 0 turns the adapter off.
    """

    name: str
    path: str
    scale: float = 0.0


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter: *id* is a hash of its file, *size_bytes* the memory that it uses."""

    id: str
    size_bytes: int


def is_scale(value: object) -> bool:
    """Return whether *value*, which may be of any type, is a scale."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -SCALE_MAX <= value <= SCALE_MAX


def adapter_key(adapter_id: str, scale: float) -> str:
    """Return the key of an adapter at a scale."""
    return f"{adapter_id}*{scale!r}"


def split_key(key: str) -> tuple[str, float]:
    """Return the id and the scale of a key; without one the scale is 1."""
    adapter_id, _, scale = key.partition("*")
    return adapter_id, float(scale or 1)

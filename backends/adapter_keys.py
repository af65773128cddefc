"""Adapters (LoRA): what a model is given beside its weights, and how a step names a choice of them.

A *key* says which adapter, by the contents of its file, and how strongly: tasks and KV states of
equal keys, sorted, were computed with the same adapters, whatever these are called.
"""

from __future__ import annotations

import msgspec

ADAPTERS_MAX = 64
"""Adapters of one model."""
SCALE_MAX = 100.0
"""A scale is −100 … 100."""


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to load: a file, under the name by which requests choose it. *scale* holds for those
    that choose nothing; 0: they have none of it.
    """

    name: str
    path: str
    scale: float = 0.0


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter: *id* names its file's contents, *size_bytes* is what it takes of memory."""

    id: str
    size_bytes: int


def is_scale(value: object) -> bool:
    """Tell whether a value that was read is a scale."""
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

"""The search for the keyword because of which llguidance refuses a schema; its errors name none."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from .schema import Keyword, Schema, keywords_of

_NEVER_REMOVED = ("$defs", "definitions", "$schema", "$id", "$anchor")
"""Removing them would make references fail."""
_ORDER = {"type": 1, "$ref": 2} | dict.fromkeys(
    ("properties", "patternProperties", "items", "prefixItems", "allOf", "anyOf"), 3
)


def refused_path(document: Schema, compiles: Callable[[Schema], bool]) -> str:
    """Return the path of a keyword without which the refused *document* compiles, or ``#``.

    Keywords are removed in order until the rest compiles: the last one removed is refused. A binary
    search finds it, so that *compiles* is called a few times only.
    """
    removable = [k for k in keywords_of(document) if k.keyword not in _NEVER_REMOVED]
    removable.sort(key=_rank)

    def compiles_without(count: int) -> bool:
        values = [keyword.schema.pop(keyword.keyword) for keyword in removable[:count]]
        try:
            return compiles(document)
        finally:
            for keyword, value in zip(removable, values, strict=False):
                keyword.schema[keyword.keyword] = value

    count = bisect_left(range(len(removable) + 1), True, key=compiles_without)
    return removable[count - 1].path if 0 < count <= len(removable) else "#"


def _rank(keyword: Keyword) -> int:
    """Return the order of removal: first what narrows values of one type."""
    return _ORDER.get(keyword.keyword, 0)

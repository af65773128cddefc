"""Sets of models that do not fit into the memory together, from the estimates of each."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

SETS_MAX = 8
"""Sets that are returned, the smallest first."""
SET_SIZE_MAX = 4
"""Models of a set that is searched; of larger sets only the one with all models is considered."""
MODELS_SEARCHED_MAX = 32
"""Models among which sets are searched, the largest first: 41 000 sets of at most 4."""


def sets_too_large(needs: Mapping[str, int], budget: int) -> list[tuple[str, ...]]:
    """Return the sets of models whose *needs* together exceed the *budget*, in bytes. A set is
    returned only if all of its parts fit; within a set, and among sets of one size, the larger
    model is first.
    """
    by_size = sorted(needs, key=lambda name: (-needs[name], name))
    found: list[tuple[str, ...]] = []
    for size in range(1, SET_SIZE_MAX + 1):
        for names in combinations(by_size[:MODELS_SEARCHED_MAX], size):
            if len(found) == SETS_MAX:
                return found
            total = sum(needs[name] for name in names)
            if total > budget and not any(set(smaller) <= set(names) for smaller in found):
                found.append(names)
    if not found and sum(needs.values()) > budget:
        found.append(tuple(by_size))
    return found

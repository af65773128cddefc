"""The order in which models are evicted, and the choice of those to evict. Pure functions.

Models that are not engaged (see `residency`) come first, by load time divided by idle time, the
least first. Engaged models follow, the longest loaded first. Sizes do not count in this order, in
which models are chosen until they free enough memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IDLE_S_MIN = 0.001


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A loaded model that may be evicted, now or, if it is engaged, later."""

    name: str
    need: int
    """Bytes that its eviction frees."""
    load_s: float
    """Seconds that a load takes."""
    idle_s: float
    is_engaged: bool = False
    """Whether `Residency.is_engaged`; if so, it may be evicted once its requests have ended."""
    just_used: bool = False
    """Whether it was used less than `JUST_USED_S` ago; its eviction waits until that has passed."""
    loaded_at: float = 0.0

    @property
    def value(self) -> float:
        """The value of keeping it loaded: the time of a load divided by the idle time."""
        return self.load_s / max(self.idle_s, IDLE_S_MIN)

    @property
    def order_key(self) -> tuple[bool, float, str]:
        """The sort key for eviction; see the module's docstring."""
        return self.is_engaged, self.loaded_at if self.is_engaged else self.value, self.name


def choose_victims(
    candidates: Iterable[EvictionCandidate], missing: int
) -> list[EvictionCandidate] | None:
    """Return the models to evict so that *missing* bytes become free, in the order of eviction;
    None if all together are not enough.
    """
    chosen: list[EvictionCandidate] = []
    for candidate in sorted(candidates, key=lambda c: c.order_key):
        if sum(c.need for c in chosen) >= missing:
            break
        chosen.append(candidate)
    if sum(c.need for c in chosen) < missing:
        return None
    for candidate in reversed(chosen):  # a large model may make smaller ones superfluous
        rest = [c for c in chosen if c is not candidate]
        if sum(c.need for c in rest) >= missing:
            chosen = rest
    return chosen

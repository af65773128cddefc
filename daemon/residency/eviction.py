"""The choice of loaded models to evict: pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

IDLE_S_MIN = 0.001


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A loaded model that may be evicted, now or, if it is *busy*, once it is idle."""

    name: str
    need: int
    """Bytes that its eviction frees."""
    load_s: float
    """Seconds that a load takes."""
    idle_s: float
    busy: bool = False
    lingers: bool = False
    """Whether it was used just now: a load that evicts it waits until that grace period ends."""
    loaded_at: float = 0.0

    @property
    def value(self) -> float:
        """The value of its memory: the time of a load divided by the idle time."""
        return self.load_s / max(self.idle_s, IDLE_S_MIN)

    @property
    def order_key(self) -> tuple[bool, float, str]:
        """The order of eviction: idle models by value, then busy ones, longest loaded first."""
        return self.busy, self.loaded_at if self.busy else self.value, self.name


def choose_victims(
    candidates: Iterable[EvictionCandidate], missing: int
) -> list[EvictionCandidate] | None:
    """Return the models to evict so that *missing* bytes become free: least value first, busy ones
    last. None: all together are not enough.
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

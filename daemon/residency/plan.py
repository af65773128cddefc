"""Decisions on memory: the treatment of a load, and the models to evict. Pure functions.

Models that are not engaged (see `residency`) are evicted first, by load time divided by idle time,
the least first. Engaged models follow, the longest loaded first. Sizes do not count in this order,
in which models are chosen until they free enough memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from ...backends import Shape
from .fit import DeviceShortage, smaller_shape

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForLoad:
    """The memory that a load needs, and that it can have at one time. Bytes of the host."""

    need: int
    free: int
    """Bytes that are neither used nor reserved."""
    ahead: int
    """Bytes that the loads ahead of it need."""
    obtainable: int
    """The most that it can have: bytes that are free, of unloading workers, of all models that may
    be evicted for it, and of models that are still being loaded.
    """
    shortage: DeviceShortage | None
    """A device that lacks memory for it and the loads ahead of it."""
    missing: int
    """Bytes that evictions must free, of the device with a shortage or else of the host."""
    candidates: Sequence[EvictionCandidate]
    """The models that may be evicted for it, now or later, with their bytes there."""

    @property
    def suffices(self) -> bool:
        """Whether the load fits once it has all bytes that it can have."""
        return self.shortage is None and self.need <= self.obtainable

    @property
    def is_free(self) -> bool:
        """Whether the load fits now, and leaves enough for the loads ahead of it."""
        return self.suffices and self.need <= min(self.free, self.obtainable - self.ahead)

    def victims(self) -> list[EvictionCandidate] | None:
        """Return the models to evict for the load; None if all that may be are not enough."""
        return choose_victims(self.candidates, self.missing)


class LoadAct(Enum):
    """The treatment of a load."""

    PROCEED = auto()
    """Reserve its memory, and load the model."""
    GIVE_UP = auto()
    """End the load: its callers have left."""
    WAIT = auto()
    """Wait for memory, and evict the victims."""
    SHRINK = auto()
    """Estimate the memory of a smaller shape."""
    LEAVE_OUT_EMBEDDINGS = auto()
    """Estimate the memory of the first shape again, without embeddings."""
    REFUSE = auto()


class LoadDecision(NamedTuple):
    """The treatment of a load, with the smaller *shape* or the models to evict now."""

    act: LoadAct
    shape: Shape | None = None
    victims: Sequence[EvictionCandidate] = ()


def decide_load(
    memory: MemoryForLoad,
    shape: Shape,
    floor: Shape,
    *,
    must_shrink: bool,
    has_waiters: bool,
    is_wanted: bool,
    embeds: bool,
) -> LoadDecision:
    """Decide on a load in *shape*, which may be reduced to *floor*. With *must_shrink*, it takes a
    smaller shape if there is one, whatever is free. *has_waiters*: callers wait for the load;
    *is_wanted*: requests do; *embeds*: it counts the memory for embeddings.
    """
    # 1. The kernel has killed the model's worker in this shape to free memory.
    if must_shrink and (smaller := smaller_shape(shape, floor)) is not None:
        return LoadDecision(LoadAct.SHRINK, smaller)
    # 2. The memory is free.
    if memory.is_free:
        return LoadDecision(LoadAct.PROCEED)
    # 3. A load for which no request waits evicts no model.
    if not has_waiters:
        return LoadDecision(LoadAct.GIVE_UP)
    # 4. Memory becomes free: by evictions, or when models that are being loaded have served their
    #    requests. All victims are evicted at once, or none yet.
    victims = memory.victims()
    if victims is not None or (is_wanted and memory.suffices):
        is_possible = not any(victim.is_engaged or victim.just_used for victim in victims or ())
        return LoadDecision(LoadAct.WAIT, victims=victims or () if is_possible else ())
    # 5. A smaller shape may fit.
    if (smaller := smaller_shape(shape, floor, memory.shortage)) is not None:
        return LoadDecision(LoadAct.SHRINK, smaller)
    # 6. A load that text alone would have does not fail because of embeddings, which fit in no
    #    shape beside it.
    return LoadDecision(LoadAct.LEAVE_OUT_EMBEDDINGS if embeds else LoadAct.REFUSE)

"""Decisions on memory: the treatment of a load, smaller shapes and refusals of models that do not
fit, the models to evict, and sets of models that do not fit together. Pure functions.

Models that are not engaged (see `residency`) are evicted first, by load time divided by idle time,
the least first. Engaged models follow, the longest loaded first. Sizes do not count in this order,
in which models are chosen until they free enough memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import combinations
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...backends import Device, MemoryNeed, Shape
from ...backends.errors import BackendError, InferdError, LoadFailed, OutOfMemory
from ..printable import size_text
from .machine import headroom_bytes

CTX_SIZE_MIN = 512
BATCH_SIZE_MIN = 128
PINNED_NAMED = 3
ADDRESS_SPACE_BYTES = 1 << 30
"""Address space that a worker uses beside a model's memory: libraries, stacks, arenas of malloc."""


@dataclass(frozen=True, slots=True)
class DeviceShortage:
    """A device that has less memory than a model needs of it."""

    device: Device
    need: int
    free: int
    """The free bytes, minus the headroom and the reservations of other loads."""

    @property
    def missing(self) -> int:
        """Bytes that must become free."""
        return self.need - self.free


def find_device_shortage(
    need: MemoryNeed, devices: Sequence[Device], reserved: Mapping[str, int]
) -> DeviceShortage | None:
    """Return the device that lacks most memory, or None if each has enough. *reserved* are the
    bytes by device that loads under way have not allocated yet.
    """
    found = []
    for device in devices:
        free = device.free - headroom_bytes(device.total) - reserved.get(device.name, 0)
        found.append(DeviceShortage(device, need.devices.get(device.name, 0), free))
    shortages = [it for it in found if it.need and it.missing > 0]
    return max(shortages, key=lambda it: it.missing, default=None)


def fewer_layers(shape: Shape, floor: Shape, shortage: DeviceShortage) -> Shape | None:
    """Return the shape with fewer layers on devices, in proportion to *shortage*, or None if
    *floor* is reached.
    """
    if shape.n_gpu_layers <= floor.n_gpu_layers:
        return None
    layers = shape.n_gpu_layers * max(0, shortage.free) // shortage.need
    layers = max(floor.n_gpu_layers, min(layers, shape.n_gpu_layers - 1))
    return replace(shape, n_gpu_layers=layers)


def device_refusal(name: str, shape: Shape, shortage: DeviceShortage) -> OutOfMemory:
    """Return the error for a model whose fixed number of layers on devices does not fit."""
    return OutOfMemory(
        f"{name!r} needs {size_text(shortage.need)} of {shortage.device.name}'s memory with"
        f" {shape.n_gpu_layers} layers on devices, and {size_text(shortage.free)} are free",
        hint="set n-gpu-layers to -1, so that the layers that fit run there, the others on the CPU",
        data={
            "device": shortage.device.name,
            "needed_bytes": shortage.need,
            "free_bytes": max(0, shortage.free),
            "total_bytes": shortage.device.total,
            "n_gpu_layers": shape.n_gpu_layers,
        },
    )


def smaller_shape(
    shape: Shape, floor: Shape, shortage: DeviceShortage | None = None
) -> Shape | None:
    """Return the next smaller shape that is not below *floor*, or None. First the slots become
    fewer (so turns wait longer), then the context and then the batch smaller. If a device has a
    *shortage*, only the layers on devices become fewer.
    """
    if shortage is not None:
        return fewer_layers(shape, floor, shortage)
    for field in ("slots", "ctx_size", "batch_size"):
        smaller = max(getattr(floor, field), getattr(shape, field) // 2)
        if smaller < getattr(shape, field):
            return replace(shape, **{field: smaller})
    return None


def memory_refusal(
    name: str,
    need: MemoryNeed,
    shape: Shape,
    floor: Shape,
    *,
    free: int,
    pinned: Sequence[tuple[str, int]],
    limit: int = 0,
    machine_free: int = 0,
) -> OutOfMemory:
    """Return the error for a model that needs *need* in *shape*, the smallest that it may have.
    *free* are the bytes that it would have after the eviction of all models that may be evicted;
    *pinned* are the names and bytes of the pinned models. *limit* is memory-bytes, or 0, beside
    which the machine has *machine_free* bytes.
    """
    advice = []
    if limit and need.total - max(0, free) <= machine_free:
        advice.append(f"raise memory-bytes ({size_text(limit)})")
    if need.projector and need.total - need.projector <= free:
        advice.append("lower media-cache-bytes, or do without images (mmproj = 'none')")
    elif need.weights + need.process + need.projector > free:
        advice.append("use a smaller model or a smaller quantization of it")
    else:
        if shape.ctx_size > CTX_SIZE_MIN and floor.ctx_size == shape.ctx_size:
            advice.append(f"use a smaller ctx-size than {shape.ctx_size}")
        if shape.slots > 1:
            advice.append(f"use fewer slots than {shape.slots}")
        if not advice:
            advice.append("use a smaller model")
    largest = sorted(pinned, key=lambda h: -h[1])[:PINNED_NAMED]
    advice += [f"unload {model} ({size_text(size)})" for model, size in largest if size > 0]
    return OutOfMemory(
        f"{name!r} needs {size_text(need.total)} of memory with {shape.slots} slots of"
        f" {shape.ctx_size} tokens, and {_free_text(free, limit)}",
        hint=", or ".join(advice),
        data={
            "needed_bytes": need.total,
            "free_bytes": max(0, free),
            "total_bytes": max(0, free) + sum(size for _, size in pinned),
            "weights_bytes": need.weights,
            "slots": shape.slots,
            "ctx_size": shape.ctx_size,
        },
    )


def _free_text(free: int, limit: int) -> str:
    of_limit = f" of the {size_text(limit)} that memory-bytes allows" if limit else ""
    return f"{size_text(free)} are free{of_limit}"


def with_sizes(
    error: InferdError, need: MemoryNeed, slots: int, ctx_size: int, free: int
) -> InferdError:
    """Return the *error* of a load that was admitted and has failed, with the memory that it
    needs and the *free* bytes. A *ctx_size* of 0 means that it is unknown.
    """
    if not isinstance(error, LoadFailed | OutOfMemory) or "needed_bytes" in error.data:
        return error
    sizes = {
        "needed_bytes": need.total,
        "free_bytes": free,
        "weights_bytes": need.weights,
        "slots": slots,
    } | ({"ctx_size": ctx_size} if ctx_size else {})
    message = error.message
    if isinstance(error, OutOfMemory):
        of_slots = f" of {ctx_size} tokens" if ctx_size else ""
        message += (
            f"; the load needs {size_text(need.total)} with {slots} slots{of_slots}, and"
            f" {size_text(free)} are free"
        )
    return type(error)(message, hint=error.hint, data=sizes | error.data, retryable=error.retryable)


def with_address_space(error: InferdError, needed: int, limit: int | None) -> InferdError:
    """Return the *error* of a load that has failed and needs *needed* bytes. It names the *limit*
    of a process's address space if that is too small for the load, and may have been the cause: an
    allocation has failed, a thread could not be started, or the process has ended.
    """
    may_be_cause = (
        isinstance(error, OutOfMemory) or type(error) is BackendError or "cause" in error.data
    )
    if limit is None or not may_be_cause or limit >= needed + ADDRESS_SPACE_BYTES:
        return error
    raised = "raise `ulimit -v`, or LimitAS= of the service, and start the daemon again"
    return type(error)(
        f"{error.message}; the address space of each process is limited to {size_text(limit)}"
        " (ulimit -v)",
        hint=f"{raised}; or {error.hint}" if isinstance(error, OutOfMemory) else raised,
        data=error.data | {"address_space_bytes": limit},
        retryable=error.retryable,
    )


def growth_refusal(
    name: str, size: int, free: int, purpose: str = "", *, limit: int = 0
) -> OutOfMemory:
    """Return the error for *size* more bytes that a loaded model cannot have. *limit* is
    memory-bytes, or 0.
    """
    return OutOfMemory(
        f"{name!r} needs {size_text(size)} more memory{purpose}, and {_free_text(free, limit)}",
        hint="use a smaller ctx-size for it, or unload another model (`inferd ps` lists them)",
        data={"needed_bytes": size, "free_bytes": max(0, free)},
    )


def smallest_shape(
    shape: Shape, options: Mapping[str, Any], requested: Mapping[str, Any], *, never_shrinks: bool
) -> Shape:
    """Return the smallest shape that a model may be loaded in. Parameters that were configured in
    *options* or *requested* keep their values in *shape*.
    """
    if never_shrinks:
        return shape
    ctx_size_min = max(CTX_SIZE_MIN, requested.get("ctx-size", 0))
    is_ctx_size_fixed = options.get("ctx-size") or ctx_size_min >= shape.ctx_size
    layers = options.get("n-gpu-layers", requested.get("n-gpu-layers", -1))
    return Shape(
        shape.slots if "slots" in options else 1,
        shape.ctx_size if is_ctx_size_fixed else ctx_size_min,
        shape.batch_size if "batch-size" in options else min(shape.batch_size, BATCH_SIZE_MIN),
        0 if layers < 0 else shape.n_gpu_layers,
    )


def reduced_parameters(first: Shape, shape: Shape) -> dict[str, int]:
    """Return the parameters of *shape* that differ from those of the *first* shape of the load."""
    fields = ("slots", "ctx_size", "batch_size", "n_gpu_layers")
    return {
        field.replace("_", "-"): getattr(shape, field)
        for field in fields
        if getattr(shape, field) != getattr(first, field)
    }


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


SETS_MAX = 8
"""Sets of models that are returned, the smallest first."""
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

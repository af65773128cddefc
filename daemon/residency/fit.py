"""Reckoning with memory: what is free, who must leave, what must shrink, what a refusal says.

Pure functions: figures and texts of /proc in, decisions out. `room` asks them and acts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...backends import Device, MemoryNeed, Shape
from ...backends.errors import OutOfMemory
from .sizes import size_text

__all__ = (
    "DeviceShort",
    "Idle",
    "available_bytes",
    "device_refusal",
    "device_short",
    "embedding_refusal",
    "fewer_layers",
    "more_refused",
    "refusal",
    "smaller",
    "spared_bytes",
    "stalled_s",
    "total_bytes",
    "victims",
)

CTX_SIZE_MIN = 512
BATCH_SIZE_MIN = 128
SPARED_BYTES_MAX = 1 << 30
HOLDERS_NAMED = 3
IDLE_S_MIN = 0.001


@dataclass(frozen=True, slots=True)
class Idle:
    """A loaded model that may leave, now or, where it is *busy*, once it is not."""

    name: str
    need: int
    """Bytes that come back when it leaves."""
    load_s: float
    """What loading it again takes."""
    idle_s: float
    busy: bool = False
    lingers: bool = False
    """It was used just now, and may be again in a moment: it does not leave yet."""
    began: float = 0.0
    """When it was loaded."""

    @property
    def worth(self) -> float:
        """What its memory is worth: the time to load it again against the time it was idle."""
        return self.load_s / max(self.idle_s, IDLE_S_MIN)

    @property
    def key(self) -> tuple[bool, float, str]:
        """What sorts those that may leave: idle ones by their worth, then the longest loaded."""
        return self.busy, self.began if self.busy else self.worth, self.name


def victims(idle: Iterable[Idle], missing: int) -> list[Idle] | None:
    """Return who leaves so that *missing* bytes come back: the least worth first, busy ones last.

    None where all of them together are not enough: then nobody is to leave.
    """
    chosen: list[Idle] = []
    for candidate in sorted(idle, key=lambda i: i.key):
        if sum(c.need for c in chosen) >= missing:
            break
        chosen.append(candidate)
    if sum(c.need for c in chosen) < missing:
        return None
    for candidate in reversed(chosen):  # a large one that came late may do without small ones
        rest = [c for c in chosen if c is not candidate]
        if sum(c.need for c in rest) >= missing:
            chosen = rest
    return chosen


@dataclass(frozen=True, slots=True)
class DeviceShort:
    """A device that has less than a model needs of it."""

    device: Device
    need: int
    free: int
    """What it has, less what is to be spared and what others were promised."""

    @property
    def missing(self) -> int:
        """Bytes that must come back."""
        return self.need - self.free


def device_short(
    need: MemoryNeed, devices: Sequence[Device], promised: Mapping[str, int]
) -> DeviceShort | None:
    """Return the device that is missing most; None: every one has what is needed of it.

    *promised* are the bytes of each that loads under way have not taken yet.
    """
    found = []
    for device in devices:
        free = device.free - spared_bytes(device.total) - promised.get(device.name, 0)
        found.append(DeviceShort(device, need.devices.get(device.name, 0), free))
    short = [it for it in found if it.need and it.missing > 0]
    return max(short, key=lambda it: it.missing, default=None)


def fewer_layers(shape: Shape, floor: Shape, short: DeviceShort) -> Shape | None:
    """Return the shape with as many layers on devices as *short* has room for, in proportion; None:
    there cannot be fewer.
    """
    if shape.n_gpu_layers <= floor.n_gpu_layers:
        return None
    layers = shape.n_gpu_layers * max(0, short.free) // short.need
    layers = max(floor.n_gpu_layers, min(layers, shape.n_gpu_layers - 1))
    return replace(shape, n_gpu_layers=layers)


def device_refusal(name: str, shape: Shape, short: DeviceShort) -> OutOfMemory:
    """Return the error for a model whose number of layers on devices stays and does not fit."""
    return OutOfMemory(
        f"{name!r} needs {size_text(short.need)} of {short.device.name}'s memory with"
        f" {shape.n_gpu_layers} layers on devices, and {size_text(short.free)} are free",
        hint="set n-gpu-layers to -1: as many as fit run there, and the others on the CPU",
        data={
            "device": short.device.name,
            "needed_bytes": short.need,
            "free_bytes": max(0, short.free),
            "total_bytes": short.device.total,
            "n_gpu_layers": shape.n_gpu_layers,
        },
    )


def smaller(shape: Shape, floor: Shape) -> Shape | None:
    """Return the next smaller shape, not below *floor*; None: there is none.

    Slots go first (others wait longer), then the context, then the rows of a step.
    """
    slots = max(floor.slots, shape.slots // 2)
    if slots < shape.slots:
        return replace(shape, slots=slots)
    ctx_size = max(floor.ctx_size, shape.ctx_size // 2)
    if ctx_size < shape.ctx_size:
        return replace(shape, ctx_size=ctx_size)
    batch_size = max(floor.batch_size, shape.batch_size // 2)
    if batch_size < shape.batch_size:
        return replace(shape, batch_size=batch_size)
    return None


def refusal(
    name: str,
    need: MemoryNeed,
    shape: Shape,
    floor: Shape,
    *,
    free: int,
    holders: Sequence[tuple[str, int]],
) -> OutOfMemory:
    """Return the error for a model that needs *need* bytes in the smallest *shape* it may have.

    *free* is what it could have had, idle models gone; *holders* keep the rest, with their bytes.
    """
    advice = []
    if need.weights + need.process > free:
        advice.append("use a smaller model or a smaller quantisation of it")
    else:
        if shape.ctx_size > CTX_SIZE_MIN and floor.ctx_size == shape.ctx_size:
            advice.append(f"use a smaller ctx-size than {shape.ctx_size}")
        if shape.slots > 1:
            advice.append(f"use fewer slots than {shape.slots}")
        if not advice:
            advice.append("use a smaller model")
    largest = sorted(holders, key=lambda h: -h[1])[:HOLDERS_NAMED]
    advice += [f"unload {holder} ({size_text(size)})" for holder, size in largest if size > 0]
    return OutOfMemory(
        f"{name!r} needs {size_text(need.total)} of memory with {shape.slots} slots of"
        f" {shape.ctx_size} tokens, and {size_text(free)} are free",
        hint=", or ".join(advice),
        data={
            "needed_bytes": need.total,
            "free_bytes": max(0, free),
            "total_bytes": max(0, free) + sum(size for _, size in holders),
            "weights_bytes": need.weights,
            "slots": shape.slots,
            "ctx_size": shape.ctx_size,
        },
    )


def embedding_refusal(name: str, needed: int, free: int) -> OutOfMemory:
    """Return the error for a model that has no memory to make embeddings in."""
    return OutOfMemory(
        f"{name!r} needs {size_text(needed)} more of memory to make embeddings, and"
        f" {size_text(free)} are free",
        hint="use a smaller ctx-size for it, or unload another model",
        data={"needed_bytes": needed, "free_bytes": max(0, free)},
    )


def more_refused(name: str, size: int, free: int) -> OutOfMemory:
    """Return the error for *size* bytes more that a loaded model cannot have."""
    return OutOfMemory(
        f"{size_text(size)} more are needed beside {name!r}, and {size_text(free)} are free",
        hint="unload models that are not needed: `inferd ps` lists them",
        data={"needed_bytes": size, "free_bytes": max(0, free)},
    )


# What the machine has.


def spared_bytes(total: int) -> int:
    """Return how much of *total* bytes is left to everybody else: a twentieth, at most 1 GiB."""
    return min(total // 20, SPARED_BYTES_MAX)


def available_bytes(meminfo: str) -> int:
    """Return the available bytes of a text as /proc/meminfo has it, less what is spared."""
    return _meminfo(meminfo, "MemAvailable") - spared_bytes(total_bytes(meminfo))


def total_bytes(meminfo: str) -> int:
    """Return all bytes of a text as /proc/meminfo has it."""
    return _meminfo(meminfo, "MemTotal")


def _meminfo(text: str, key: str) -> int:
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(fields[key].split()[0]) * 1024


def stalled_s(text: str) -> float | None:
    """Return for how long some task waited, of a text as /proc/pressure/memory has it; None: that
    is not told.
    """
    found = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return int(found[1]) / 1e6 if found is not None else None

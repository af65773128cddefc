"""Smaller shapes in which a model fits, and the errors where none does: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ...backends import Device, MemoryNeed, Shape
from ...backends.errors import OutOfMemory
from .resident_model import ResidentModel
from .sizes import headroom_bytes, size_text

CTX_SIZE_MIN = 512
BATCH_SIZE_MIN = 128
HOLDERS_NAMED = 3


@dataclass(frozen=True, slots=True)
class DeviceShortage:
    """A device that has less than a model needs of it."""

    device: Device
    need: int
    free: int
    """Its free bytes, less the headroom and what is reserved for other loads."""

    @property
    def missing(self) -> int:
        """Bytes that must become free."""
        return self.need - self.free


def find_device_shortage(
    need: MemoryNeed, devices: Sequence[Device], reserved: Mapping[str, int]
) -> DeviceShortage | None:
    """Return the device that lacks most; None: each has enough.

    *reserved* are the bytes of each device that loads under way have not taken yet.
    """
    found = []
    for device in devices:
        free = device.free - headroom_bytes(device.total) - reserved.get(device.name, 0)
        found.append(DeviceShortage(device, need.devices.get(device.name, 0), free))
    shortages = [it for it in found if it.need and it.missing > 0]
    return max(shortages, key=lambda it: it.missing, default=None)


def fewer_layers(shape: Shape, floor: Shape, shortage: DeviceShortage) -> Shape | None:
    """Return the shape with as many layers on devices as fit with *shortage*, in proportion; None:
    there cannot be fewer.
    """
    if shape.n_gpu_layers <= floor.n_gpu_layers:
        return None
    layers = shape.n_gpu_layers * max(0, shortage.free) // shortage.need
    layers = max(floor.n_gpu_layers, min(layers, shape.n_gpu_layers - 1))
    return replace(shape, n_gpu_layers=layers)


def device_refusal(name: str, shape: Shape, shortage: DeviceShortage) -> OutOfMemory:
    """Return the error for a model whose number of layers on devices is fixed and does not fit."""
    return OutOfMemory(
        f"{name!r} needs {size_text(shortage.need)} of {shortage.device.name}'s memory with"
        f" {shape.n_gpu_layers} layers on devices, and {size_text(shortage.free)} are free",
        hint="set n-gpu-layers to -1: as many as fit run there, and the others on the CPU",
        data={
            "device": shortage.device.name,
            "needed_bytes": shortage.need,
            "free_bytes": max(0, shortage.free),
            "total_bytes": shortage.device.total,
            "n_gpu_layers": shape.n_gpu_layers,
        },
    )


def next_smaller_shape(shape: Shape, floor: Shape) -> Shape | None:
    """Return the next smaller shape, not below *floor*; None: there is none.

    Slots shrink first (other turns wait longer), then the context, then the batch.
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


def memory_refusal(
    name: str,
    need: MemoryNeed,
    shape: Shape,
    floor: Shape,
    *,
    free: int,
    holders: Sequence[tuple[str, int]],
) -> OutOfMemory:
    """Return the error for a model that needs *need* bytes in the smallest *shape* it may have.

    *free* is what it could have had without the idle models; *holders* are the models that have the
    rest, with their bytes.
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
    """Return the error for a model that lacks the memory for embeddings."""
    return OutOfMemory(
        f"{name!r} needs {size_text(needed)} more of memory to make embeddings, and"
        f" {size_text(free)} are free",
        hint="use a smaller ctx-size for it, or unload another model",
        data={"needed_bytes": needed, "free_bytes": max(0, free)},
    )


def growth_refusal(name: str, size: int, free: int) -> OutOfMemory:
    """Return the error for *size* bytes more that a loaded model cannot have."""
    return OutOfMemory(
        f"{size_text(size)} more are needed beside {name!r}, and {size_text(free)} are free",
        hint="unload models that are not needed: `inferd ps` lists them",
        data={"needed_bytes": size, "free_bytes": max(0, free)},
    )


def smallest_shape(model: ResidentModel, shape: Shape) -> Shape:
    """Return the smallest shape that *model* may be loaded in; parameters that were asked for keep
    the values of *shape*.
    """
    set_by_hand = model.options()
    if model.never_shrinks:
        return shape
    wanted = model.wanted_ctx_size
    ctx_size = min(shape.ctx_size, max(CTX_SIZE_MIN, wanted))
    if set_by_hand.get("ctx-size") or wanted >= shape.ctx_size:
        ctx_size = shape.ctx_size
    return Shape(
        shape.slots if "slots" in set_by_hand else 1,
        ctx_size,
        shape.batch_size if "batch-size" in set_by_hand else min(shape.batch_size, BATCH_SIZE_MIN),
        0 if set_by_hand.get("n-gpu-layers", model.wanted_gpu_layers) < 0 else shape.n_gpu_layers,
    )


def reduced_parameters(asked: Shape, shape: Shape) -> dict[str, int]:
    """Return the parameters whose values in force are smaller than the defaults would be."""
    names = ("slots", "ctx-size", "batch-size", "n-gpu-layers")
    fields = {name: name.replace("-", "_") for name in names}
    return {
        key: getattr(shape, field)
        for key, field in fields.items()
        if getattr(shape, field) != getattr(asked, field)
    }

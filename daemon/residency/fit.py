"""Smaller shapes and refusals of models that do not fit. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    if need.weights + need.process > free:
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

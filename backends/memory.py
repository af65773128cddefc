"""Memory: that which a model needs, with the devices that hold it, and that of this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from .errors import InvalidArgument
from .model_spec import ModelSpec, Shape


class Device(msgspec.Struct, frozen=True):
    """A device other than the CPU that can run layers, with its memory in bytes."""

    name: str
    free: int
    total: int


def check_devices(spec: ModelSpec, found: list[Device]) -> None:
    """Raise InvalidArgument if *spec* chooses a device that is not among those *found*.

    Without devices the CPU runs all layers, whatever *spec* chooses.
    """
    names = ", ".join(device.name for device in found)
    if found and spec.main_gpu >= len(found):
        raise InvalidArgument(
            f"main-gpu {spec.main_gpu}: there are {len(found)} devices, {names}",
            hint=f"use 0 to {len(found) - 1}, or -1 for all",
        )
    if found and len(spec.tensor_split) > len(found):
        raise InvalidArgument(
            f"tensor-split has {len(spec.tensor_split)} parts for {len(found)} devices, {names}",
            hint=f"give {len(found)} numbers at most",
        )


def layers_on_devices(spec: ModelSpec, layers: int, found: Sequence[object]) -> int:
    """Return how many of a model's *layers* run on the devices *found*; 0 if there are none."""
    if not found:
        return 0
    return layers if spec.n_gpu_layers < 0 else min(spec.n_gpu_layers, layers)


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a loaded model's process on the host and on devices, in bytes."""

    weights: int = 0
    context: int = 0
    """KV states of all slots."""
    compute: int = 0
    """Buffers of a step, with logits and the CPU's work buffer."""
    process: int = 0
    """The vocabulary, the libraries, the interpreter, and llama.cpp's tables of the cells."""
    projector: int = 0
    """The encoder process of a model with a projector: its weights, the buffer in which it
    computes, the vocabulary, and the embeddings that are kept.
    """
    draft: int = 0
    """The draft model: its weights, its KV states, and the buffers in which it computes. Of a
    model's NextN layers, all but their weights, which are among the model's.
    """
    devices: dict[str, int] = {}
    """Bytes by the device's name, with those of the draft model; not in the numbers above."""
    embedding: int = 0
    """The embedding context. It is created at its first use and counts in `total` from then on."""
    embedding_devices: dict[str, int] = {}
    """The embedding context's bytes by the device's name."""
    measuring: int = 0
    """The contexts of a probe runner on the host, in addition to `total`; 0: the settings of this
    model are not measured.
    """
    options: int = 0
    """The bytes that the engine's options add to `context` and `compute`; negative if they save."""

    @property
    def total(self) -> int:
        """All bytes on the host."""
        own = self.weights + self.context + self.compute + self.process
        return own + self.projector + self.draft

    def with_embedding(self) -> MemoryNeed:
        """Return the need of a model whose embedding context exists."""
        names = {*self.devices, *self.embedding_devices}
        return msgspec.structs.replace(
            self,
            context=self.context + self.embedding,
            devices={
                n: self.devices.get(n, 0) + self.embedding_devices.get(n, 0) for n in sorted(names)
            },
            embedding=0,
            embedding_devices={},
        )


class MemoryEstimator(Protocol):
    """A model that was opened but not loaded; estimates the memory that loading it would take."""

    @property
    def shape(self) -> Shape:
        """The spec's shape, with the model's defaults where the spec has none."""

    @property
    def devices(self) -> list[Device]:
        """The devices that can run layers, with their current free memory."""

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the memory that the model needs in *shape*.

        :raises LoadFailed: llama.cpp refuses a context of this shape.
        """

    def close(self) -> None:
        """Close the model."""


def resident_bytes(pid: int | str = "self") -> int:
    """Return the memory that a process occupies now: its own, and pages of files such as mapped
    weights (RSS; `Pss` would need a walk over all pages). It is 0 if the process has exited.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_bytes().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt`."""


def return_large_blocks(size: int) -> None:
    """Have glibc return blocks of *size* bytes or more to the system as soon as they are freed.

    By default, once a block of up to 32 MiB was freed, glibc takes later blocks of that size from
    its heap. There, small objects behind a block keep its memory. glibc's own threshold at the
    start is 128 KiB. Blocks that are allocated at each step should be smaller than *size*, because
    a block from the system costs 0.2 ms for each MiB.
    """
    configure = getattr(ctypes.CDLL(None), "mallopt", None)
    if configure is not None:
        configure(_MMAP_THRESHOLD, size)
        configure(_TRIM_THRESHOLD, 2 * size)


def return_free_memory() -> None:
    """Have glibc return the free part of its heap; other C libraries do so by themselves.

    Without it, glibc returned 36 of 412 MB (states of 0.2 to 3 MB among small objects): freeing a
    block of that size raises its mmap threshold, so later blocks come from the heap. Takes 23 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""The machine's GPUs, and whether the engine can use them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...residency.sizes import size_text
from ..finding import Finding, ok, warn
from .engine_packages import EngineReport

CUDA = "build the engine for it: `CMAKE_ARGS=-DGGML_CUDA=on`, or `make install GPU=cuda` in a clone"
HIP = "build the engine for it: `CMAKE_ARGS=-DGGML_HIP=on`, or -DGGML_VULKAN=on"


class Gpus(msgspec.Struct, frozen=True):
    """Device files: of NVIDIA's driver, of AMD's compute driver, and of render nodes."""

    nvidia: list[str] = []
    amd: list[str] = []
    render: list[str] = []
    closed: list[str] = []
    """Device files that the caller may not open."""


def find_gpus(dev: Path = Path("/dev")) -> Gpus:
    """Return the device files below *dev*."""
    patterns = ("nvidia[0-9]*", "kfd", "dri/renderD*")
    nvidia, amd, render = (sorted(map(str, dev.glob(pattern))) for pattern in patterns)
    files = (*nvidia, *amd, *render)
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    return Gpus(nvidia, amd, render, closed)


def check_gpus(gpus: Gpus, engine: EngineReport | None) -> Iterator[Finding]:
    """Compare the machine's GPUs with the engine's build."""
    has_gpu_support = engine is not None and engine.gpu
    if engine is not None and engine.devices:
        devices = (
            f"{d.name} with {size_text(d.free)} of {size_text(d.total)} free"
            for d in engine.devices
        )
        yield ok(", ".join(devices))
    elif has_gpu_support and gpus.closed:
        yield warn(
            f"you may not open {', '.join(gpus.closed)}",
            "join the groups video and render; for the service: `inferd install-service --gpu`",
        )
    elif has_gpu_support:
        yield warn(
            "the engine was built for a GPU, but llama.cpp finds none and uses the CPU",
            "check that its driver is loaded (`nvidia-smi`, `rocminfo`)",
        )
    elif gpus.nvidia or gpus.amd:
        yield warn(
            f"{', '.join(gpus.nvidia + gpus.amd)} is not used: the engine was built without GPUs",
            CUDA if gpus.nvidia else HIP,
        )
    else:
        unused = f"; {', '.join(gpus.render)} is not used" if gpus.render else ""
        yield ok(f"none for computing{unused}")

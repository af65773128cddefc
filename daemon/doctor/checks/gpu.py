"""GPUs: those that the machine has, and whether the engine was built to use them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...residency.sizes import size_text
from ..finding import Finding, ok, warn
from .engine_packages import Engine

CUDA = "build the engine for it: `CMAKE_ARGS=-DGGML_CUDA=on`, or `make install GPU=cuda` in a clone"
HIP = "build the engine for it: `CMAKE_ARGS=-DGGML_HIP=on`, or -DGGML_VULKAN=on"


class Gpus(msgspec.Struct, frozen=True):
    """Device files: of NVIDIA's driver, of AMD's for computing, of any that draws."""

    nvidia: list[str] = []
    amd: list[str] = []
    drawing: list[str] = []
    closed: list[str] = []
    """Those of them that the caller may not open."""


def look_at_gpus(dev: Path = Path("/dev")) -> Gpus:
    """Look for device files below *dev*."""
    nvidia = sorted(str(p) for p in dev.glob("nvidia[0-9]*"))
    amd = [str(p) for p in (dev / "kfd",) if p.exists()]
    drawing = sorted(str(p) for p in dev.glob("dri/renderD*"))
    every = (*nvidia, *amd, *drawing)
    closed = [path for path in every if not os.access(path, os.R_OK | os.W_OK)]
    return Gpus(nvidia, amd, drawing, closed)


def check_gpus(gpus: Gpus, engine: Engine | None) -> Iterator[Finding]:
    """Compare the machine's GPUs with what the engine was built for."""
    built = engine is not None and engine.gpu
    if engine is not None and engine.devices:
        told = (
            f"{d.name} with {size_text(d.free)} of {size_text(d.total)} free"
            for d in engine.devices
        )
        yield ok("gpu", ", ".join(told))
    elif built and gpus.closed:
        yield warn(
            "gpu",
            f"you may not open {', '.join(gpus.closed)}",
            "join the groups video and render; for the service: `inferd install-service --gpu`",
        )
    elif built:
        yield warn(
            "gpu",
            "the engine was built for a GPU, and llama.cpp finds none: the CPU computes",
            "see whether its driver is loaded (`nvidia-smi`, `rocminfo`)",
        )
    elif gpus.nvidia or gpus.amd:
        yield warn(
            "gpu",
            f"{', '.join(gpus.nvidia + gpus.amd)} is not used: the engine was built without GPUs",
            CUDA if gpus.nvidia else HIP,
        )
    else:
        beside = f"; {', '.join(gpus.drawing)} is not used" if gpus.drawing else ""
        yield ok("gpu", f"none to compute on{beside}")

"""The memory that a graph in ONNX takes, estimated from the sizes of its files."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import LoadFailed
from ..memory import Device, MemoryNeed, resident_bytes
from ..model_spec import ModelSpec, Shape
from .header import read_onnx_header

WEIGHTS_FACTOR = 1.3
"""The memory of a load from a path, by the bytes of the files: a float32 network of 256 MiB took
266 MiB, and 329 MiB at the peak.
"""
LIBRARY_BYTES = 40 << 20
"""ONNX Runtime and NumPy in a process that has not imported them."""


def model_path(spec: ModelSpec) -> str:
    """Return the path of the file of *spec*, which may be a descriptor of this process."""
    return f"/proc/self/fd/{spec.fd}" if spec.fd >= 0 else spec.path


class OnnxMemoryEstimator:
    """The `MemoryEstimator` of graphs in ONNX.

    :raises LoadFailed: the file cannot be read, or is not an ONNX file.
    """

    def __init__(self, spec: ModelSpec):
        self.shape = Shape(slots=1, ctx_size=0, batch_size=1)
        self.devices: list[Device] = []
        path = model_path(spec)
        header = read_onnx_header(path)
        folder = Path(path).parent
        try:
            size = os.stat(path).st_size
        except OSError as exc:
            raise LoadFailed(f"cannot read {path!r}: {exc.strerror}") from None
        self._weights = weight_bytes(size + sum(_size(folder / one) for one in header.external))

    def need(self, shape: Shape) -> MemoryNeed:
        """Return the memory of the graph, which has one shape."""
        return MemoryNeed(weights=self._weights, process=resident_bytes() + LIBRARY_BYTES)

    def close(self) -> None:
        """Close nothing."""


def weight_bytes(file_bytes: int) -> int:
    """Return the memory of the weights in files of *file_bytes*."""
    return round(WEIGHTS_FACTOR * file_bytes)


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except OSError:  # the engine reports it
        return 0

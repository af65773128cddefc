"""The memory that a graph in ONNX takes, estimated from the sizes of its files."""

from __future__ import annotations

import os
from pathlib import Path

from .. import ENGINES
from ..graphs import GraphMemoryEstimator, file_bytes, model_path
from ..model_spec import ModelSpec
from .header import read_onnx_header

LIBRARY_BYTES = 40 << 20
"""ONNX Runtime and NumPy in a process that has not imported them."""


class OnnxMemoryEstimator(GraphMemoryEstimator):
    """The `MemoryEstimator` of graphs in ONNX.

    :raises LoadFailed: the file cannot be read, or is not an ONNX file.
    """

    def __init__(self, spec: ModelSpec):
        path = model_path(spec)
        header, folder = read_onnx_header(path), Path(path).parent
        size = file_bytes(path) + sum(_size(folder / one) for one in header.external)
        super().__init__(round(ENGINES["onnx"].weights_factor * size), 0, LIBRARY_BYTES)


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size
    except OSError:  # the engine reports it
        return 0

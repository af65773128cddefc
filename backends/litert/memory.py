"""The memory that a graph in TensorFlow Lite takes, estimated from its file."""

from __future__ import annotations

from .. import ENGINES
from ..graphs import GraphMemoryEstimator, file_bytes, model_path
from ..model_spec import ModelSpec
from .header import read_litert_header

LIBRARY_BYTES = 40 << 20
"""LiteRT and NumPy in a process that has not imported them."""


class LiteRtMemoryEstimator(GraphMemoryEstimator):
    """The `MemoryEstimator` of graphs in TensorFlow Lite.

    :raises LoadFailed: the file cannot be read, or is not a TensorFlow Lite file.
    """

    def __init__(self, spec: ModelSpec):
        path = model_path(spec)
        header = read_litert_header(path)
        weights = round(ENGINES["litert"].weights_factor * file_bytes(path))
        super().__init__(weights, header.activation_bytes, LIBRARY_BYTES)

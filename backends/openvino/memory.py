"""The memory that a graph takes in OpenVINO, estimated from its files."""

from __future__ import annotations

from pathlib import Path

from .. import ENGINES
from ..graph_files import files_of_graph
from ..graphs import GraphMemoryEstimator, file_bytes, model_path
from ..model_spec import ModelSpec
from ..onnx.header import read_onnx_header

LIBRARY_BYTES = 80 << 20
"""OpenVINO with its plugin for the CPU, and NumPy, in a process that has not imported them."""


class OpenVinoMemoryEstimator(GraphMemoryEstimator):
    """The `MemoryEstimator` of graphs in OpenVINO.

    :raises LoadFailed: a file cannot be read.
    """

    def __init__(self, spec: ModelSpec):
        size = sum(map(file_bytes, graph_paths(spec)))
        factor = ENGINES["openvino"].weights_factor
        if spec.fd >= 0:
            factor += 1  # the bytes of the files, which are read before
        super().__init__(round(factor * size), 0, LIBRARY_BYTES)


def graph_paths(spec: ModelSpec) -> list[str]:
    """Return the paths of the files of *spec*, which may be descriptors of this process.

    :raises LoadFailed: a file in ONNX cannot be read, or is damaged.
    """
    path = model_path(spec)
    if spec.fd >= 0:
        return [path, *([f"/proc/self/fd/{spec.weights_fd}"] if spec.weights_fd >= 0 else [])]
    files = files_of_graph(Path(path))
    if path.lower().endswith(".onnx"):
        folder = Path(path).parent
        others = [folder / one for one in sorted(read_onnx_header(path).external)]
        files += [one for one in others if one.is_file()]  # the engine reports a missing one
    return [str(one) for one in files]

"""A graph in TensorFlow Lite, as LiteRT computes it on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from ..errors import InferdError, LoadFailed, load_cancelled
from ..graphs import (
    TYPE_NUMBERS,
    LaneGraph,
    array_bytes,
    check_copy,
    check_output_bytes,
    check_types,
    graph_info,
    load_error,
    model_path,
    run_error,
    string_tensor,
)
from ..model_spec import LoadProgress, ModelSpec
from ..tensors import ARRAY_TYPES, STRING, Inputs, NamedTensor, Tensor, TensorInfo, unpack_strings
from .header import LiteRtHeader, read_litert_header

_SERVED = (*(kind for kind in ARRAY_TYPES if kind != "bf16"), STRING)
"""The types of tensors. LiteRT's Python API has no bfloat16."""


def load_litert(spec: ModelSpec, progress: LoadProgress, *, renders: bool = False) -> LiteRtModel:
    """Load the graph of *spec*; see `load_model`."""
    path = model_path(spec)
    header = read_litert_header(path)
    check_types(spec, header.inputs, header.outputs, _SERVED)
    if not progress(0.0):
        raise load_cancelled(spec.name)
    model = LiteRtModel(spec, path, header)
    if not progress(1.0):
        raise load_cancelled(spec.name)
    return model


class LiteRtModel(LaneGraph["ShapedInterpreter"]):
    """The `GraphModel` of a TensorFlow Lite file.

    An interpreter computes in one thread at a time, with weights of its own for the CPU, and the
    buffers of its last shapes. The next caller would see the variables of one that has any.
    """

    def __init__(self, spec: ModelSpec, path: str, header: LiteRtHeader):
        self._spec, self._path, self._header = spec, path, header
        title = header.title or "TensorFlow Lite graph"
        info = graph_info("tflite", title, [path], header.inputs, header.outputs)
        super().__init__(info, header.tensor_names, reuses_runners=not header.has_variables)

    def new_runner(self) -> ShapedInterpreter:
        """Return an interpreter with the shapes of the file, which has allocated its buffers.

        :raises InferdError: LiteRT does not load the file.
        """
        try:
            return ShapedInterpreter(self._path, self._spec.lane_threads, self._header)
        except InferdError:
            raise
        except Exception as exc:  # LiteRT's errors have no common class
            raise load_error("LiteRT", "ai-edge-litert", self._spec, exc) from None


class ShapedInterpreter:
    """An interpreter whose buffers are allocated for the shapes of its last inputs."""

    def __init__(self, path: str, threads: int, header: LiteRtHeader):
        self._interpreter = Interpreter(model_path=path, num_threads=threads)
        inputs = self._interpreter.get_input_details()
        outputs = self._interpreter.get_output_details()
        if (len(inputs), len(outputs)) != (len(header.inputs), len(header.outputs)):
            raise LoadFailed(
                "LiteRT and the file disagree on the number of inputs and outputs",
                hint="convert or download the model again",
            )
        self._inputs = [one["index"] for one in inputs]
        self._outputs = [one["index"] for one in outputs]
        self._shapes = [tuple(map(int, one["shape"])) for one in inputs]
        self._interpreter.allocate_tensors()

    def compute(self, inputs: Inputs, outputs: Sequence[TensorInfo]) -> list[NamedTensor]:
        """Return the *outputs* of *inputs*; see `LaneRunner`."""
        try:
            self._resize([tensor for _, tensor in inputs])
            for index, (declared, tensor) in zip(self._inputs, inputs, strict=True):
                self._interpreter.set_tensor(index, _array(declared, tensor))
            self._interpreter.invoke()
            sizes = [one["shape"] for one in self._interpreter.get_output_details()]
        except InferdError:
            raise
        except Exception as exc:  # LiteRT's errors have no common class
            raise run_error(exc) from None
        check_output_bytes(
            sum(
                int(np.prod(size, dtype=np.int64)) * np.dtype(ARRAY_TYPES[declared.type]).itemsize
                for size, declared in zip(sizes, outputs, strict=True)
                if declared.type != STRING
            )
        )
        return [
            (declared.name, self._output(index, declared))
            for index, declared in zip(self._outputs, outputs, strict=True)
        ]

    def _resize(self, inputs: Sequence[Tensor]) -> None:
        shapes = [tensor.dimensions for tensor in inputs]
        if shapes == self._shapes:
            return
        for index, shape, old in zip(self._inputs, shapes, self._shapes, strict=True):
            if shape != old:
                self._interpreter.resize_tensor_input(index, shape)
        self._interpreter.allocate_tensors()
        self._shapes = shapes

    def _output(self, index: int, declared: TensorInfo) -> Tensor:
        try:
            array = self._interpreter.get_tensor(index)  # a copy
        except Exception as exc:  # LiteRT's errors have no common class
            raise run_error(exc) from None
        if declared.type == STRING:
            return string_tensor(array.flat, array.shape, array.size)
        return Tensor(array_bytes(array), tuple(array.shape), TYPE_NUMBERS[declared.type])


def _array(declared: TensorInfo, tensor: Tensor) -> Any:
    if declared.type == STRING:
        elements = np.array(unpack_strings(tensor.data), object)
    else:
        elements = np.frombuffer(tensor.data, ARRAY_TYPES[declared.type])
        if declared.type == "bool" and isinstance(tensor.data, memoryview):
            elements = elements.copy()
            check_copy(declared, elements)
    return elements.reshape(tensor.dimensions)

"""Small graphs in OpenVINO's format, made with `openvino` from graphs in ONNX, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset13

from inferd.backends.openvino.model import engine_core


def write_ir(folder: Path, graphs: Mapping[str, bytes]) -> None:
    """Write `NAME.xml` and `NAME.bin` of graphs in ONNX."""
    core = engine_core()
    for name, data in graphs.items():
        save(core.read_model(data), folder / f"{name}.xml")


def save(graph: Any, file: Path) -> None:
    openvino.save_model(graph, file, compress_to_fp16=False)


def sum_so_far() -> Any:
    """Return a graph that adds `x` to a state, and returns the sum."""
    x = opset13.parameter([1, 1], np.float32, name="x")
    x.output(0).set_names({"x"})
    state = opset13.read_value(opset13.constant(np.zeros((1, 1), np.float32)), "state")
    total = opset13.add(state, x)
    total.output(0).set_names({"y"})
    assign = opset13.assign(total, "state")
    return openvino.Model([opset13.result(total)], [assign], [x], "sum")


def bounded() -> Any:
    """Return a graph that copies `x` with one to four rows; the ports have two names each."""
    x = opset13.parameter([openvino.Dimension(1, 4), 2], np.float32, name="x")
    x.output(0).set_names({"x", "other_x"})
    y = opset13.negative(x)
    y.output(0).set_names({"y", "another_y"})
    return openvino.Model([opset13.result(y)], [x], "bounded")


def strings() -> Any:
    """Return a graph that copies strings."""
    x = opset13.parameter([-1], openvino.Type.string, name="x")
    x.output(0).set_names({"x"})
    return openvino.Model([opset13.result(x)], [x], "strings")

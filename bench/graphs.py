"""The graphs of the bench, and callers that compute them in a daemon and in this process.

Three graphs: magika (a convolution over a long input), a perceptron with four layers of 1024
(matrix work), and one that adds up 8 KiB and returns 1 KiB. The daemon's callers are tasks of this
process, which share graphs of asynchronous clients. In this process by itself, as many threads as
there are cores compute one input at a time, each on one thread; callers wait for them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from inferd import AsyncClient, AsyncTensorGraph, Tensor
from tests.onnx_graphs import graph

from .machine import THREADS
from .streams import Stream

CALLERS_MAX = 64
CALLERS_OF_A_CLIENT = 16
WIDTH, LAYERS = 1024, 4
MAGIKA, PERCEPTRON, SMALL = "magika", "mlp", "small"
VARIANTS: Mapping[str, Sequence[str]] = {
    "": (),
    "-single": ("batch-max = 1",),
    "-latency": ("latency = true",),
}
"""The settings of a graph's models in the daemon, by the ends of their names."""
KINDS = {"<f4": "fp32", "<i4": "i32", "<i8": "i64"}
"""Types of tensors by NumPy's codes."""
SMALL_IN, SMALL_OUT = 2048, 256
"""The numbers of float32 in the inputs and outputs of the small graph."""


class Work(NamedTuple):
    """A graph's file, and the name and value of its input."""

    file: Path
    name: str
    value: Any


def perceptron() -> bytes:
    """Return a network of `LAYERS` layers of `WIDTH`."""
    rng = np.random.default_rng(1)
    nodes, weights = [], []
    for layer in range(LAYERS):
        matrix = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / np.sqrt(WIDTH)
        weights.append(onnx.numpy_helper.from_array(matrix.astype(np.float32), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [f"x{layer}", f"w{layer}"], [f"m{layer}"]))
        nodes.append(helper.make_node("Relu", [f"m{layer}"], [f"x{layer + 1}"]))
    shape: Sequence[int | str] = ["n", WIDTH]
    return graph(nodes, [("x0", "fp32", shape)], [(f"x{LAYERS}", "fp32", shape)], weights)


def small() -> bytes:
    """Return a graph that adds up groups of numbers, which takes some microseconds."""
    groups = SMALL_IN // SMALL_OUT
    size = helper.make_tensor("shape", TensorProto.INT64, [3], [-1, SMALL_OUT, groups])
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [2])
    return graph(
        [
            helper.make_node("Reshape", ["x", "shape"], ["grouped"]),
            helper.make_node("ReduceSum", ["grouped", "axis"], ["y"], keepdims=0),
        ],
        [("x", "fp32", ["n", SMALL_IN])],
        [("y", "fp32", ["n", SMALL_OUT])],
        [size, axis],
    )


def works(folder: Path) -> dict[str, Work]:
    """Write the graphs and return them by name."""
    spec = importlib.util.find_spec("magika")
    assert spec is not None and spec.origin is not None, "install magika"
    [magika] = Path(spec.origin).parent.glob("models/standard_v3_*/model.onnx")
    (folder / "mlp.onnx").write_bytes(perceptron())
    (folder / "small.onnx").write_bytes(small())
    rng = np.random.default_rng(2)
    row = rng.standard_normal((1, WIDTH)).astype(np.float32)
    numbers = rng.standard_normal((1, SMALL_IN)).astype(np.float32)
    data = rng.integers(0, 257, (1, 2048), dtype=np.int32)
    return {
        MAGIKA: Work(magika, "bytes", data),
        PERCEPTRON: Work(folder / "mlp.onnx", "x0", row),
        SMALL: Work(folder / "small.onnx", "x", numbers),
    }


def configuration(works: Mapping[str, Work]) -> str:
    """Return the text of a configuration with each graph in all variants."""
    lines = ["[daemon]", f"cores = {THREADS}", "sessions-max = 1024"]
    for name, work in works.items():
        for suffix, settings in VARIANTS.items():
            lines += [f"[models.{name}{suffix}]", f"file = {json.dumps(str(work.file))}", *settings]
    return "\n".join(lines)


Call = Callable[[int], Awaitable[object]]
"""Makes one call for the caller of a number."""


async def call_for(call: Call, callers: int, seconds: float, label: str) -> Stream:
    """Let each of the *callers* make one call after the other for some *seconds*; return the time
    that this took, with a token for each call.
    """
    began, done = time.perf_counter(), 0
    end = began + seconds

    async def repeat(caller: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call(caller)
            done += 1

    async with asyncio.TaskGroup() as group:
        for caller in range(callers):
            group.create_task(repeat(caller))
    return Stream(began, (time.perf_counter(),), done, done, label)


class InProcess:
    """ONNX Runtime in this process."""

    def __init__(self, work: Work, pool: ThreadPoolExecutor):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(work.file), options, providers=["CPUExecutionProvider"]
        )
        self._inputs, self._pool = {work.name: work.value}, pool

    async def call(self, caller: int) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._session.run, None, self._inputs)


class InDaemon:
    """Callers of a daemon, of which `CALLERS_OF_A_CLIENT` share an asynchronous client and its
    graph.
    """

    def __init__(self, graphs: Sequence[AsyncTensorGraph], inputs: Mapping[str, Any]):
        self._graphs = graphs
        self._inputs = {
            name: Tensor(
                data=array.tobytes(), dimensions=[*array.shape], type=KINDS[array.dtype.str]
            )
            for name, array in inputs.items()
        }

    @classmethod
    async def open(
        cls, stack: AsyncExitStack, socket: str, model: str, inputs: Mapping[str, Any]
    ) -> InDaemon:
        """Open the graph of each client, until the end of *stack*. *inputs* are arrays by name."""
        count = -(-CALLERS_MAX // CALLERS_OF_A_CLIENT)
        clients = [await stack.enter_async_context(AsyncClient(socket)) for _ in range(count)]
        graphs = [await stack.enter_async_context(client.graph(model)) for client in clients]
        return cls(graphs, inputs)

    async def call(self, caller: int) -> None:
        await self._graphs[caller // CALLERS_OF_A_CLIENT].run_tensors(self._inputs)

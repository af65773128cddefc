"""Scenario of tensors of 64 MiB that a program shares with a graph's process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from bench import streams as s
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd import Client
from inferd.testing import running_daemon
from tests.onnx_graphs import graph, write_graphs

from .base import INFERD, Scenario, Side, Started, Work

BYTES = 64 << 20
COPIED, IN_PLACE = "copied", "in place"
KINDS = {"i32": COPIED, "fp32": IN_PLACE}
"""The types of the inputs. Integers are copied by the graph's process, floating-point numbers read
in place.
"""
SLICES, SLICES_SMALL = 6, 1
SLICE_S = 0.3
"""The time for which one of the calls is made before the other one."""


def first(kind: str) -> bytes:
    """Return a graph with the first element of its input of this type, which takes microseconds."""
    ends = [helper.make_tensor(n, TensorProto.INT64, [1], [i]) for i, n in enumerate(("b", "e"))]
    node = helper.make_node("Slice", ["x", "b", "e"], ["y"])
    return graph([node], [("x", kind, ["n"])], [("y", kind, [1])], ends)


async def drive(calls: Mapping[str, Callable[[], object]], work: Work) -> list[Stream]:
    """Make one call after the other, and the two in turn; return a stream for each call."""
    found: list[Stream] = []
    for call in calls.values():  # the first call makes the buffer and maps it
        call()
    for _ in range(SLICES_SMALL if work.small else SLICES):
        for label, call in calls.items():
            end = time.perf_counter() + (0 if work.small else SLICE_S)
            while True:
                began = time.perf_counter()
                call()
                ended = time.perf_counter()
                found.append(Stream(began, (ended,), 1, 1, label))
                if ended >= end:
                    break
    return found


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the rate of the copied tensors, and the times of the calls."""
    by_label = s.by_label(streams)
    copied_s, in_place_s = ([one.ttft_s for one in by_label[name]] for name in (COPIED, IN_PLACE))
    return {
        "copied_gb_per_s": BYTES / 1e9 / median(copied_s),
        "in_place_p50_ms": 1e3 * median(in_place_s),
        "in_place_p90_ms": 1e3 * s.percentile(in_place_s, 0.9),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with the graphs, and open them."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_graphs(folder, {f"first-{kind}": first(kind) for kind in KINDS})
    daemon = await stack.enter_async_context(running_daemon(models_dir=folder))
    client = stack.enter_context(Client(daemon.socket))
    integers, floats = (
        stack.enter_context(client.graph(f"first-{kind}")) for kind in ("i32", "fp32")
    )
    view = client.buffer(BYTES).view([BYTES // 4], "fp32")
    view.array[:] = 1
    numbers = np.arange(BYTES // 4, dtype=np.int32)
    calls: dict[str, Callable[[], object]] = {
        COPIED: partial(integers.run, {"x": numbers}),
        IN_PLACE: partial(floats.run, {"x": view}),
    }
    sides: dict[str, Side] = {INFERD: partial(drive, calls)}
    return Started(sides, {"onnxruntime": onnxruntime.__version__})


SCENARIO = Scenario(
    name="graph-buffers",
    title="A large tensor for a graph",
    about=f"""\
A single program of Python gives a graph {BYTES >> 20} MiB, of which the graph returns the first
number. **Copied**: integers in an array of the program's own, which the client copies into a buffer
that it uses for each call, and the graph's process out of it. **In place**: floating-point numbers
that the program has written into a buffer, which the graph reads there.""",
    figures=(
        Figure("copied_gb_per_s", "copied, GB/s"),
        Figure("in_place_p50_ms", "in place, median ms"),
        Figure("in_place_p90_ms", "in place, p90, ms"),
    ),
    targets=(
        Target("copied_gb_per_s", INFERD, least=2.0),
        Target("in_place_p50_ms", INFERD, most=1.0),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

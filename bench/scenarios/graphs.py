"""Scenario of graphs that are not language models: calls of many programs, in the daemon and in one
process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import onnxruntime

from bench.graphs import (
    CALLERS_MAX,
    CALLERS_OF_A_CLIENT,
    LAYERS,
    MAGIKA,
    PERCEPTRON,
    WIDTH,
    Call,
    InDaemon,
    InProcess,
    call_for,
    configuration,
    works,
)
from bench.machine import THREADS
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd.testing import running_daemon

from .base import INFERD, Scenario, Side, Started, Work

IN_PROCESS = "in process"
ONE_BY_ONE = "inferd, batch-max = 1"
LATENCY = "inferd, latency"
VARIANTS = {INFERD: "", ONE_BY_ONE: "-single", LATENCY: "-latency"}
"""The ends of the names of models, by side."""
CALLERS = (1, 16, CALLERS_MAX)
SECONDS, SECONDS_SMALL = 1.0, 0.05
"""The time in which the calls of one graph are counted."""
WARM_UP = 0.25
"""The part of that time for which callers call before."""


async def drive(calls: Mapping[str, Call], work: Work) -> list[Stream]:
    """Call one graph after the other; return a stream for each, with a token for each call."""
    seconds, found = SECONDS_SMALL if work.small else SECONDS, []
    for graph, call in calls.items():
        await call_for(call, work.case, WARM_UP * seconds, graph)
        found.append(await call_for(call, work.case, seconds, graph))
    return found


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the calls per second of each graph."""
    return {f"{s.label}_per_s": s.tokens / (s.ended_s - s.requested_s) for s in streams}


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with the graphs, and open them for all callers."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    graphs = {name: work for name, work in works(Path(folder)).items() if name in SHOWN}
    daemon = await stack.enter_async_context(running_daemon(configuration(graphs)))
    pool = stack.enter_context(ThreadPoolExecutor(THREADS))
    here = {name: InProcess(work, pool).call for name, work in graphs.items()}
    sides: dict[str, Side] = {IN_PROCESS: partial(drive, here)}
    for side, suffix in VARIANTS.items():
        calls: dict[str, Call] = {}
        for name, work in graphs.items():
            inputs = {work.name: work.value}
            callers = await InDaemon.open(stack, daemon.socket, f"{name}{suffix}", inputs)
            calls[name] = callers.call
        sides[side] = partial(drive, calls)
    return Started(sides, {"onnxruntime": onnxruntime.__version__})


SHOWN = {MAGIKA: "magika", PERCEPTRON: "perceptron"}
SCENARIO = Scenario(
    name="graphs",
    title="Graphs that are not language models",
    about=f"""\
Programs compute one input after the other with a graph in ONNX: magika, a convolution over a long
input, and a perceptron with {LAYERS} layers of {WIDTH}. **{IN_PROCESS}**: ONNX Runtime in the
process of the programs, whose {THREADS} threads compute one input each at a time. **{INFERD}**
computes waiting inputs together where that pays, **{ONE_BY_ONE}** never does, and **{LATENCY}**
computes one at a time on {THREADS} threads. The programs are tasks of one process of Python, with a
connection for each {CALLERS_OF_A_CLIENT}; so the cores also have the work of the clients and of the
daemon. Calls are counted for {SECONDS:g} s.""",
    case_heading="callers",
    cases=CALLERS,
    figures=tuple(Figure(f"{name}_per_s", f"{shown}, calls/s", 0) for name, shown in SHOWN.items()),
    targets=(
        Target("magika_per_s", INFERD, IN_PROCESS, least=0.9, case=1),
        Target("magika_per_s", INFERD, IN_PROCESS, least=0.95, case=16),
        Target("magika_per_s", INFERD, IN_PROCESS, least=0.95, case=64),
        Target("mlp_per_s", INFERD, IN_PROCESS, least=1.5, case=16),
        Target("mlp_per_s", INFERD, IN_PROCESS, least=2.0, case=64),
        Target("mlp_per_s", INFERD, ONE_BY_ONE, case=16),
        Target("mlp_per_s", INFERD, ONE_BY_ONE, case=64),
        Target("magika_per_s", LATENCY, INFERD, least=1.45, case=1),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

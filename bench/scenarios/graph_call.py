"""Scenario of the time that the daemon and a worker add to a small computation of a graph."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median

import onnxruntime

from bench import streams as s
from bench.graphs import SMALL, SMALL_IN, SMALL_OUT, configuration, works
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd import Client
from inferd.daemon.workers.process import cpu_seconds
from inferd.testing import running_daemon

from .base import INFERD, Scenario, Side, Started, Work

RUN, QUEUE = "run", "queue"
SLICES, SLICES_SMALL = 10, 1
SLICE_S = 0.2
"""The time for which one of the calls is made before the other one."""
RUN_US_MAX, OVER_QUEUE_US_MAX = 300.0, 100.0


async def drive(
    calls: Mapping[str, Callable[[], object]], pids: Mapping[str, int], work: Work
) -> list[Stream]:
    """Make one call after the other, and the two in turn. A call is a stream. The CPU time of a
    process is one of as many seconds, with a token for each computation.
    """
    found: list[Stream] = []
    used = dict.fromkeys(pids, 0.0)
    for _ in range(SLICES_SMALL if work.small else SLICES):
        for label, call in calls.items():
            before = {process: cpu_seconds(pid) for process, pid in pids.items()}
            found += make_calls(label, call)
            if label == RUN:
                for process, pid in pids.items():
                    used[process] += cpu_seconds(pid) - before[process]
    count = sum(stream.label == RUN for stream in found)
    return found + [Stream(0.0, (cpu_s,), count, count, name) for name, cpu_s in used.items()]


def make_calls(label: str, call: Callable[[], object]) -> list[Stream]:
    """Make one call after the other for `SLICE_S`."""
    found: list[Stream] = []
    end = time.perf_counter() + SLICE_S
    while not found or found[-1].ended_s < end:
        began = time.perf_counter()
        call()
        found.append(Stream(began, (time.perf_counter(),), 1, 1, label))
    return found


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the times of the calls, and the CPU time of a computation by process."""
    by_label = s.by_label(streams)
    run_us, queue_us = ([1e6 * one.ttft_s for one in by_label.pop(name)] for name in (RUN, QUEUE))
    cpu = {f"{name}_cpu_us": 1e6 * one.ended_s / one.tokens for name, [one] in by_label.items()}
    return {
        "run_p50_us": median(run_us),
        "queue_p50_us": median(queue_us),
        "over_queue_us": median(run_us) - median(queue_us),
        "run_p90_us": s.percentile(run_us, 0.9),
        **cpu,
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with the small graph, and open it."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    graph = works(Path(folder))[SMALL]
    daemon = await stack.enter_async_context(running_daemon(configuration({SMALL: graph})))
    client = stack.enter_context(Client(daemon.socket))
    opened = stack.enter_context(client.graph(SMALL))
    calls: dict[str, Callable[[], object]] = {
        RUN: partial(opened.run, {graph.name: graph.value}),
        QUEUE: client.queue,
    }
    pids = {"client": os.getpid(), "daemon": daemon.pid, "worker": client.show(SMALL)["pid"]}
    sides: dict[str, Side] = {INFERD: partial(drive, calls, pids)}
    return Started(sides, {"onnxruntime": onnxruntime.__version__})


SCENARIO = Scenario(
    name="graph-call",
    title="A small computation of a graph",
    about=f"""\
A single program of Python calls `graph.run` on a graph that adds up groups of numbers, which takes
some microseconds: {4 * SMALL_IN // 1024} KiB in, {4 * SMALL_OUT // 1024} KiB out. In turn with it,
the program calls `queue`, which passes the same processes and computes nothing. The CPU time is
that of one `graph.run` in each process.""",
    figures=(
        Figure("run_p50_us", "run, median µs", 0),
        Figure("queue_p50_us", "queue, median µs", 0),
        Figure("over_queue_us", "run over queue, µs", 0),
        Figure("run_p90_us", "run, p90, µs", 0),
        Figure("client_cpu_us", "client, CPU µs", 0),
        Figure("daemon_cpu_us", "daemon, CPU µs", 0),
        Figure("worker_cpu_us", "worker, CPU µs", 0),
    ),
    targets=(
        Target("run_p50_us", INFERD, most=RUN_US_MAX),
        Target("over_queue_us", INFERD, most=OVER_QUEUE_US_MAX),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

"""Scenario of urgent computations beside programs of low priority that keep a graph busy."""

from __future__ import annotations

import asyncio
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import onnxruntime

from bench import streams as s
from bench.machine import THREADS
from bench.runs import Figure, Target
from bench.streams import Stream
from inferd import AsyncClient, AsyncTensorGraph, Tensor
from inferd.testing import running_daemon
from tests.onnx_graphs import loop, write_graphs

from .base import INFERD, Scenario, Started, Work

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BUSY, OTHER = "busy", "other"
"""Two graphs, of which the first one is kept busy."""
LOW_CALLERS = 8 * THREADS
RUN_S = 0.03
"""The time of one computation on an idle machine."""
TIMES_TRIED = 20_000
"""The iterations that are timed to find those of `RUN_S`."""
CALLS, CALLS_SMALL = 60, 3
"""The urgent calls of each graph."""
PAUSE_S_MAX = 2 * RUN_S
"""Urgent calls begin after a random part of it, at any time of a computation."""
RUN, ALONE = "run", "alone"


def inputs(times: int) -> dict[str, Tensor]:
    """Return the inputs of a computation of this number of iterations."""
    return {
        "x": Tensor(data=bytes(4), dimensions=[1], type="fp32"),
        "times": Tensor(data=struct.pack("<q", times), dimensions=[], type="i64"),
    }


class Callers:
    """Programs that share two graphs: those of low priority, and an urgent one."""

    def __init__(self, client: AsyncClient, graphs: Mapping[str, AsyncTensorGraph]):
        self._client, self._graphs = client, graphs
        self._inputs = inputs(TIMES_TRIED)

    @classmethod
    async def open(cls, stack: AsyncExitStack, client: AsyncClient) -> Callers:
        """Open both graphs until the end of *stack*."""
        names = (BUSY, OTHER)
        return cls(client, {n: await stack.enter_async_context(client.graph(n)) for n in names})

    async def calibrate(self) -> None:
        """Find the iterations of a computation that takes `RUN_S`."""
        taken = [(await self._timed("", self._call_urgent(BUSY))).ttft_s for _ in range(5)]
        self._inputs = inputs(round(TIMES_TRIED * RUN_S / min(taken)))

    def _call_urgent(self, graph: str) -> Callable[[], Awaitable[object]]:
        return partial(self._graphs[graph].run_tensors, self._inputs, priority="urgent")

    async def _timed(self, label: str, call: Callable[[], Awaitable[object]]) -> Stream:
        began = time.perf_counter()
        await call()
        return Stream(began, (time.perf_counter(),), 1, 1, label)

    async def _computed(self) -> tuple[int, int]:
        """Return the number of computations of the busy graph, and their microseconds."""
        while BUSY not in (found := (await self._client.stats())["models"]):
            pass  # its process has not answered in time
        batches = found[BUSY]["batches"]
        return sum(count for _, count, _ in batches), sum(us for *_, us in batches)

    @asynccontextmanager
    async def _busy(self) -> AsyncIterator[None]:
        """Keep the graph busy during the body."""
        is_over = False

        async def repeat() -> None:
            while not is_over:
                await self._graphs[BUSY].run_tensors(self._inputs, priority="low")

        async with asyncio.TaskGroup() as group:
            for _ in range(LOW_CALLERS):
                group.create_task(repeat())
            yield
            is_over = True

    async def drive(self, work: Work) -> list[Stream]:
        """Make urgent calls, first alone and then beside the others. Return a stream for each, and
        one that takes as long as a computation beside the others.
        """
        rng, count = work.rng(), CALLS_SMALL if work.small else CALLS
        found = [
            await self._timed(ALONE, self._call_urgent(OTHER))
            for _ in range(min(count, CALLS // 4))
        ]
        async with self._busy():
            await asyncio.sleep(4 * RUN_S)
            runs, us = await self._computed()
            for _ in range(count):
                for graph in (BUSY, OTHER):
                    await asyncio.sleep(rng.uniform(0, PAUSE_S_MAX))
                    found.append(await self._timed(graph, self._call_urgent(graph)))
            runs_now, us_now = await self._computed()
        run_s = 1e-6 * (us_now - us) / (runs_now - runs)
        return [*found, Stream(0.0, (run_s,), 1, 1, RUN)]


def measure(streams: Sequence[Stream]) -> dict[str, float]:
    """Return the time of a computation, and the waits of the urgent calls in such times."""
    times_s = {label: [one.ttft_s for one in each] for label, each in s.by_label(streams).items()}
    [run_s], alone_s = times_s[RUN], median(times_s[ALONE])
    waits = [(taken - run_s) / run_s for taken in times_s[BUSY]]
    others = [(taken - alone_s) / run_s for taken in times_s[OTHER]]
    return {
        "run_ms": 1e3 * run_s,
        "wait_p50_runs": median(waits),
        "wait_p90_runs": s.percentile(waits, 0.9),
        "wait_worst_runs": max(waits),
        "other_p90_runs": s.percentile(others, 0.9),
    }


async def start(stack: AsyncExitStack) -> Started:
    """Start a daemon with both graphs, and load them."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    write_graphs(folder, {BUSY: loop(), OTHER: loop()})
    text = f"[daemon]\ncores = {THREADS}\n"
    daemon = await stack.enter_async_context(running_daemon(text, models_dir=folder))
    client = await stack.enter_async_context(AsyncClient(daemon.socket))
    callers = await Callers.open(stack, client)
    await callers.calibrate()
    return Started({INFERD: callers.drive}, {"onnxruntime": onnxruntime.__version__})


SCENARIO = Scenario(
    name="graph-urgent",
    title="Urgent computations beside a busy graph",
    about=f"""\
{LOW_CALLERS} programs of low priority keep a graph busy, whose computations take {1e3 * RUN_S:g} ms
each on one of {THREADS} cores and are never joined. At random times, another program makes an
urgent call on the same graph, or on another one. The wait is the time of the call without that of a
computation, in times of a computation beside the others: at most 1 if the urgent call is the next
one that a thread begins. For the other graph, it is the time by which the busy one delays it.""",
    figures=(
        Figure("run_ms", "a computation, ms", 1),
        Figure("wait_p50_runs", "wait, median, computations"),
        Figure("wait_p90_runs", "wait, p90, computations"),
        Figure("wait_worst_runs", "wait, worst, computations"),
        Figure("other_p90_runs", "delay of another graph, p90, computations"),
    ),
    targets=(
        Target("wait_p90_runs", INFERD, most=1.0),
        Target("other_p90_runs", INFERD, most=1.0),
    ),
    start=start,
    measure=measure,
    pictures=(),
)

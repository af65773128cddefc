"""The bench of graphs: each side computes for all callers."""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack

import pytest

from bench.scenarios import graph_call, graphs
from bench.scenarios.base import Scenario, Work
from bench.streams import Stream


async def figures_of(scenario: Scenario, case: int) -> dict[str, dict[str, float]]:
    """Return the figures of a small run of each side."""
    async with AsyncExitStack() as stack:
        started = await scenario.start(stack)
        return {
            name: scenario.measure(await side(Work(case, 1, 1, small=True)))
            for name, side in started.sides.items()
        }


@pytest.mark.asyncio
@pytest.mark.process
async def test_each_side_computes_for_all_callers() -> None:
    found = await figures_of(graphs.SCENARIO, graphs.CALLERS[-1])
    assert list(found) == [graphs.IN_PROCESS, *graphs.VARIANTS]
    for figures in found.values():
        assert list(figures) == [figure.name for figure in graphs.SCENARIO.figures]
        assert all(rate > 0 for rate in figures.values())


@pytest.mark.asyncio
@pytest.mark.process
async def test_a_small_computation_is_timed_in_each_process() -> None:
    [figures] = (await figures_of(graph_call.SCENARIO, 0)).values()
    assert set(figures) == {figure.name for figure in graph_call.SCENARIO.figures}
    assert all(figures[name] > 0 for name in figures.keys() - {"over_queue_us"})


def test_the_time_over_a_call_that_computes_nothing_is_that_of_the_medians() -> None:
    call = Stream(1.0, (1.0,), 1, 1)
    streams = [
        dataclasses.replace(call, arrivals_s=(1.0 + us * 1e-6,), label=label)
        for label, times in (("run", (500, 300, 900)), ("queue", (100, 250, 200)))
        for us in times
    ]
    cpu = [Stream(0.0, (0.0003,), 3, 3, name) for name in ("client", "daemon", "worker")]
    figures = graph_call.measure([*streams, *cpu])
    assert figures["run_p50_us"] == pytest.approx(500)
    assert figures["over_queue_us"] == pytest.approx(300)
    assert figures["daemon_cpu_us"] == pytest.approx(100)

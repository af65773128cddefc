"""The bench of graphs: each side computes for all callers."""

from __future__ import annotations

import dataclasses
from contextlib import AsyncExitStack

import pytest

from bench.scenarios import graph_buffers, graph_call, graph_text, graph_urgent, graphs
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


@pytest.mark.asyncio
@pytest.mark.process
async def test_each_side_embeds_texts_for_all_callers() -> None:
    found = await figures_of(graph_text.SCENARIO, graph_text.CALLERS[-1])
    sides = [graph_text.ONNX_RUNTIME, graph_text.OPENVINO, *graph_text.VARIANTS]
    assert list(found) == sides
    assert all(figures["texts_per_s"] > 0 for figures in found.values())


@pytest.mark.asyncio
@pytest.mark.process
async def test_large_tensors_are_timed_with_copies_and_in_place() -> None:
    [figures] = (await figures_of(graph_buffers.SCENARIO, 0)).values()
    assert list(figures) == [figure.name for figure in graph_buffers.SCENARIO.figures]
    assert all(figure > 0 for figure in figures.values())


@pytest.mark.asyncio
@pytest.mark.process
async def test_urgent_calls_are_timed_beside_a_busy_graph() -> None:
    [figures] = (await figures_of(graph_urgent.SCENARIO, 0)).values()
    assert list(figures) == [figure.name for figure in graph_urgent.SCENARIO.figures]
    assert figures["run_ms"] > 0


def test_waits_are_counted_in_computations() -> None:
    def calls(label: str, *milliseconds: float) -> list[Stream]:
        return [Stream(n, (n + ms * 1e-3,), 1, 1, label) for n, ms in enumerate(milliseconds)]

    figures = graph_urgent.measure(
        [
            *calls(graph_urgent.ALONE, 30, 20, 90),
            *calls(graph_urgent.BUSY, 50, 100, 75),
            *calls(graph_urgent.OTHER, 30, 55, 80),
            *calls(graph_urgent.RUN, 50),
        ]
    )
    assert figures == pytest.approx(
        {
            "run_ms": 50,
            "wait_p50_runs": 0.5,
            "wait_p90_runs": 1,
            "wait_worst_runs": 1,
            "other_p90_runs": 1,
        }
    )


def test_the_rate_of_copied_tensors_is_that_of_the_median_call() -> None:
    labels = (graph_buffers.COPIED, graph_buffers.IN_PLACE)
    streams = [
        Stream(n, (n + s,), 1, 1, label)
        for label, seconds in zip(labels, ((0.01, 0.02, 0.4), (0.001, 0.0005, 0.002)), strict=True)
        for n, s in enumerate(seconds)
    ]
    figures = graph_buffers.measure(streams)
    assert figures["copied_gb_per_s"] == pytest.approx((64 << 20) / 1e9 / 0.02)
    assert figures["in_place_p50_ms"] == pytest.approx(1.0)

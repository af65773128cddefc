"""The shared counters of an engine: their place in the record, and when they are written."""

from __future__ import annotations

import os

import pytest

from inferd.scheduler.record import (
    PAGE_COUNTERS,
    PAGE_GAUGES,
    POWERS_OF_TWO,
    WRITTEN_S,
    ActivityKind,
    Histogram,
    MetricsPage,
    Recorder,
    StepKind,
    create_record,
    histograms_of,
)

VALUES = {name: float(n) for n, name in enumerate((*PAGE_COUNTERS, *PAGE_GAUGES), start=1)}


def test_counters_are_read_from_the_shared_record_and_the_activity_stays() -> None:
    record = create_record()
    engine, daemon, acts = MetricsPage(record), MetricsPage(record), Recorder(record)
    acts.record_activity(ActivityKind.STEP, range(509))
    assert set(daemon.read_counters()) == {0.0}
    engine.count_step(StepKind.DECODE, 3, 3, 0.004)
    engine.write_page(1.0, 0, VALUES)
    os.close(record)
    assert dict(zip(PAGE_COUNTERS, daemon.read_counters(), strict=False)) == {
        n: VALUES[n] for n in PAGE_COUNTERS
    }
    assert daemon.read_gauges() == {name: VALUES[name] for name in PAGE_GAUGES}
    found = histograms_of(daemon.read_counters())
    assert (found["decode_s"].sum, sum(found["decode_s"].counts)) == (0.004, 1)
    assert found["decode_s"].counts[found["decode_s"].bounds.index(0.005)] == 1
    assert sum(found["mixed_s"].counts) == sum(found["prefill_s"].counts) == 0
    assert acts.read_activity().ids == tuple(range(509))


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([1], StepKind.DECODE),
        ([1] * 16, StepKind.DECODE),
        ([1, 40], StepKind.MIXED),
        ([40], StepKind.PREFILL),
        ([40, 40], StepKind.PREFILL),
    ],
)
def test_a_step_is_of_one_kind_and_prompts_alone_may_take_longer(
    counts: list[int], kind: StepKind
) -> None:
    figures = MetricsPage(target_s=0.15)
    for seconds in (0.1, 0.2):
        figures.count_step(kind, sum(counts), len(counts), seconds)
    figures.write_page(0.0, 0, VALUES)
    found = histograms_of(figures.read_counters())
    counted = {k: sum(found[f"{k}_s"].counts) for k in StepKind}
    assert counted == {k: 2 * (k is kind) for k in StepKind}
    assert figures.over_target == (kind is not StepKind.PREFILL)
    assert found["tokens_per_step"].sum == 2 * sum(counts)
    assert found["sequences_per_step"].sum == 2 * len(counts)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 1023, 1024, 1025, 2048, 2049, 1 << 20])
def test_powers_of_two_are_buckets_like_any(rows: int) -> None:
    figures, wanted = MetricsPage(), Histogram(POWERS_OF_TWO)
    figures.count_step(StepKind.PREFILL, rows, 1, 0.1)
    figures.write_page(0.0, 0, VALUES)
    wanted.observe(rows)
    assert histograms_of(figures.read_counters())["tokens_per_step"].counts == wanted.counts


def test_counters_are_due_only_after_a_step_or_a_change() -> None:
    figures = MetricsPage()
    assert figures.due_in(5.0, 0) == float("-inf")
    figures.write_page(5.0, 0, VALUES)
    assert figures.due_in(5.0, 0) is None and figures.due_in(9.0, 0) is None
    assert figures.due_in(5.01, 1) == pytest.approx(WRITTEN_S - 0.01)
    figures.count_step(StepKind.DECODE, 1, 1, 0.1)
    assert figures.due_in(5.0 + 2 * WRITTEN_S, 0) == pytest.approx(-WRITTEN_S)

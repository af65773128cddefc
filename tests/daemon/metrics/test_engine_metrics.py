"""The engine's counters match its work."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.scheduler.kv.disk import KvFiles
from inferd.scheduler.owner import Priority
from inferd.scheduler.record import PAGE_COUNTERS, WRITTEN_S, MetricsPage, histograms_of
from inferd.scheduler.settings import EngineSettings
from tests.scheduler.doubles import Bench
from tests.scheduler.kv.test_kv_reuse import settle

TEXT = "a text that is long enough to be worth keeping"
TOKENS = len(TEXT) + 2
"""Tokens of the prompt: its bytes, and those that start and end it."""


def counted(bench: Bench) -> dict[str, float]:
    """Return the counters as the daemon reads them."""
    figures: MetricsPage = bench.engine.metrics.page
    bench.engine.metrics.publish(at_once=True)
    return dict(zip(PAGE_COUNTERS, figures.read_counters(), strict=False))


def test_tokens_steps_and_parks_are_those_of_the_turns() -> None:
    bench = Bench(slots=1, settings=EngineSettings(quantum_tokens=8))
    bench.run(bench.submit(1, TEXT), bench.submit(2, TEXT[::-1], priority=Priority.URGENT))
    found = counted(bench)
    stats = [bench.stats(1), bench.stats(2)]
    assert found["generated"] == sum(s.output_tokens for s in stats)
    assert found["prefix_queries"] == sum(s.prompt_tokens for s in stats) == 2 * TOKENS
    assert found["prompt"] + found["cached"] == found["prefix_queries"]
    assert found["parks"] == sum(s.parks for s in stats)
    steps = histograms_of(bench.engine.metrics.page.read_counters())
    kinds = [sum(steps[f"{kind}_s"].counts) for kind in ("decode", "mixed", "prefill")]
    assert sum(kinds) == bench.engine.metrics.steps == sum(steps["tokens_per_step"].counts)
    assert steps["tokens_per_step"].sum == found["batch_tokens"]


def test_a_parked_turn_that_comes_back_was_restored() -> None:
    bench = Bench(slots=1)
    bench.iterate(bench.submit(1, TEXT, priority=Priority.LOW))
    bench.iterate()
    before = counted(bench)
    bench.run(bench.submit(2, "urgent", priority=Priority.URGENT, no_cache=True))
    after = counted(bench)
    assert bench.stats(1).parks == 1
    assert after["parks"] - before["parks"] == 1
    assert after["restores"] - before["restores"] == 1


def test_cached_tokens_are_counted_by_tier() -> None:
    bench = Bench(slots=1)
    bench.run(bench.submit(1, TEXT))
    bench.run(bench.submit(2, TEXT))
    assert counted(bench)["reused_slot"] == TOKENS - 1
    bench.run(bench.submit(3, "something else that takes the one slot there is"))
    before = counted(bench)
    bench.run(bench.submit(4, TEXT))
    after = counted(bench)
    assert after["reused_memory"] - before["reused_memory"] == TOKENS - 1
    tiers = sum(after[f"reused_{tier}"] for tier in ("slot", "memory", "disk"))
    assert tiers == after["cached"] == sum(bench.stats(n).cached_tokens for n in range(1, 5))


def test_tokens_read_from_disk_are_counted_once(tmp_path: Path) -> None:
    first = Bench(files=KvFiles(tmp_path, "echo-1"))
    first.run(first.submit(1, TEXT, session="kept", persist=True))
    first.engine.kv.close()
    files = KvFiles(tmp_path, "echo-1")
    second = Bench(slots=1, files=files, settings=EngineSettings(shared_prefix_tokens_min=16))
    second.iterate(second.submit(2, TEXT))
    settle(second, files)
    found = counted(second)
    assert (found["reused_disk"], found["fetches"], found["restores"]) == (TOKENS - 1, 1, 1)
    second.run(second.submit(3, "something else that takes the one slot there is"))
    second.run(second.submit(4, TEXT))
    second.engine.kv.close()
    assert counted(second)["reused_disk"] == TOKENS - 1
    assert counted(second)["reused_memory"] >= TOKENS - 1


def test_counters_are_published_periodically_and_once_more_when_idle() -> None:
    bench = Bench()
    published = bench.engine.metrics.page.read_counters
    bench.iterate(bench.submit(1, TEXT))
    assert bench.engine.metrics.publish() is None and published() != (0.0,) * len(published())
    bench.iterate()
    first, due_s = published(), bench.engine.metrics.publish()
    assert due_s == pytest.approx(WRITTEN_S) and published() == first
    bench.now += WRITTEN_S
    bench.iterate()
    assert bench.engine.metrics.publish() is None and published() != first

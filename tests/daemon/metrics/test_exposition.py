"""The work of a scrape in calls of functions: linear, and little if nothing has changed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import pytest
from prometheus_client.core import Metric

from inferd.daemon.config.settings import Config
from inferd.daemon.core import Daemon
from inferd.daemon.metrics import exposition as exposition_module
from inferd.daemon.metrics.collector import SLICE_S
from inferd.daemon.metrics.exposition import Exposition
from inferd.daemon.metrics.families import FAMILIES, PREFIX
from inferd.scheduler.owner import Owner
from inferd.sessions import Opening
from tests.daemon.metrics.scraping import ScrapedMetrics
from tests.scheduler.doubles import Bench
from tests.sessions.doubles import InProcessClient, Source

SESSIONS = 200
CALLS_MAX = 20
"""Of functions, by a scrape for each session."""


@asynccontextmanager
async def daemon_with(sessions: int, folder: Path) -> AsyncIterator[Daemon]:
    """Yield a daemon with open sessions, without a worker."""
    config = Config(
        socket=folder / "s", models_dir=folder, state_dir=folder, cores=1, kv_ram_bytes=0,
        sessions_max=sessions, sessions_user_max=sessions,
    )  # fmt: skip
    async with anyio.create_task_group() as group:
        daemon = Daemon(config, group, 1)
        source = Source(InProcessClient(Bench()))
        for number in range(sessions):
            daemon.sessions.open_session(Opening(number, Owner(1), source, {}))
        yield daemon


async def calls_of(scrape: Exposition) -> int:
    """Return the number of Python functions that a scrape calls."""
    count = 0

    def note(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        await scrape.scrape()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.asyncio
async def test_a_scrape_s_work_grows_in_proportion_to_the_sessions(tmp_path: Path) -> None:
    calls = []
    for factor in (1, 2, 3):
        async with daemon_with(factor * SESSIONS, tmp_path) as daemon:
            exposition = Exposition(daemon)
            await exposition.scrape()
            calls.append(await calls_of(exposition))
    assert calls[2] - calls[1] <= 1.2 * (calls[1] - calls[0]) <= 1.2 * CALLS_MAX * SESSIONS


@pytest.mark.asyncio
async def test_families_that_have_not_changed_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon_with(SESSIONS, tmp_path) as daemon:
        exposition = Exposition(daemon)
        await exposition.scrape()
        written = 0

        def count_written(metric: Metric) -> bytes:
            nonlocal written
            written += 1
            return write(metric)

        write = exposition_module._written
        monkeypatch.setattr(exposition_module, "_written", count_written)
        await exposition.scrape()
        process = sum(1 for _ in exposition_module._process.collect())
        assert written <= process + 3, "free memory, the journal's lag and the like"
        daemon.counters.observe("model_load_seconds", ("m",), 2.0)
        daemon.sessions.forked += 3
        daemon.counters.counts["model_unloads"][("m",)] += 1
        scraped = ScrapedMetrics((await exposition.scrape()).decode())
    assert scraped("model_load_seconds_count", model_name="m") == 1
    assert scraped("model_load_seconds_bucket", model_name="m", le="2.5") == 1
    assert scraped("session_forks_total") == 3
    assert scraped("model_unloads_total", model_name="m") == 1
    assert {name.removeprefix(PREFIX) for name in scraped.families if PREFIX in name} == {*FAMILIES}


@pytest.mark.asyncio
async def test_other_work_of_the_loop_continues_during_a_scrape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two families, once they have taken `SLICE_S`."""
    now = 0.0

    def slow_clock() -> float:
        nonlocal now
        now += SLICE_S
        return now

    monkeypatch.setattr("inferd.daemon.metrics.collector.time.monotonic", slow_clock)
    async with daemon_with(1, tmp_path) as daemon:
        turns, over = 0, False

        async def work() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await Exposition(daemon).scrape()
            over = True
    assert turns >= len(FAMILIES)

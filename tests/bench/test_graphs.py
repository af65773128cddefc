"""The bench of graphs: each side computes for all callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.graphs import CALLERS, configuration, measure, measure_calls, works
from inferd.testing import running_daemon


@pytest.mark.asyncio
@pytest.mark.process
async def test_each_side_computes_for_all_callers(tmp_path: Path) -> None:
    small = {"small": works(tmp_path)["small"]}
    with running_daemon(configuration(small)) as daemon:
        found = await measure(daemon.socket, small, 1, 0.05)
    assert list(found) == [("small", callers) for callers in CALLERS]
    for rates in found.values():
        assert list(rates) == ["in process", "one by one", "joined"]
        assert all(rate > 0 for each in rates.values() for rate in each)


@pytest.mark.process
def test_each_call_is_timed_in_each_process(tmp_path: Path) -> None:
    small = {"small": works(tmp_path)["small"]}
    with running_daemon(configuration(small)) as daemon:
        found = measure_calls(daemon, small["small"], 2, 0.05)
    assert list(found) == ["run", "queue"]
    for times in found.values():
        assert len(times.seconds) >= 2 and all(seconds > 0 for seconds in times.seconds)
        assert list(times.cpu_s) == ["client", "daemon", "worker"]

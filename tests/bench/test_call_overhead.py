"""The time that the client library adds to a call."""

from __future__ import annotations

from statistics import median

import pytest

from bench.call_overhead import measure
from inferd.testing import running_daemon


@pytest.mark.alone
def test_a_call_takes_little_more_than_twice_the_time_of_a_raw_socket() -> None:
    """The ratio was 1.8 to 2.15 on several machines; a fast one makes the socket cheaper."""
    with running_daemon() as daemon:
        times = {name: median(seconds) for name, seconds in measure(daemon.socket, 10, 100).items()}
    assert set(times) == {"raw socket", "Client", "AsyncClient"}
    assert times["Client"] < 2.5 * times["raw socket"], times

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.testing import RunningDaemon
from tests.module_daemon import client, daemon
from tests.raw import RawClient

__all__ = ("client", "daemon", "raw")


@pytest.fixture
def raw(daemon: RunningDaemon) -> Iterator[RawClient]:
    with RawClient(daemon.socket) as connected:
        yield connected

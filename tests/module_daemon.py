"""Fixtures that folders import in their conftest.py: the daemon of a module, and a client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon

__all__ = ("client", "daemon")


@pytest.fixture(scope="module")
def daemon(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    """One daemon for a module's tests, with the module's `CONFIG` if it has one."""
    with running_daemon(getattr(request.module, "CONFIG", "")) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as connected:
        yield connected

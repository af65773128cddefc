from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.testing import RunningDaemon
from tests.gateways.nnrpc.driver import WasmEdge, gateway


@pytest.fixture(scope="module")
def path(daemon: RunningDaemon) -> Iterator[str]:
    """The socket of a gateway for a module's tests."""
    with gateway(daemon) as (socket, _):
        yield socket


@pytest.fixture
def guest(path: str) -> Iterator[WasmEdge]:
    with WasmEdge(path) as connected:
        yield connected

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import BlockingPortal

from tests.ipc.fake_server import FakeServer, fake_server_thread


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[tuple[FakeServer, BlockingPortal]]:
    with fake_server_thread(tmp_path) as pair:
        yield pair


@pytest.fixture
def server(fake: tuple[FakeServer, BlockingPortal]) -> FakeServer:
    return fake[0]


@pytest.fixture
def portal(fake: tuple[FakeServer, BlockingPortal]) -> BlockingPortal:
    return fake[1]

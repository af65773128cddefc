"""Architectures with unusual memories pass the checks of `make archs` through a daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.architectures.served import AFTER_A_RESTART, CONFIG, SERVED, Served
from tools.architectures.models import MISSING, find_models

pytestmark = pytest.mark.model

NAMES = ("qwen35-dense", "deepseek2-moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = find_models(NAMES)
    assert files is not None, MISSING
    found = tmp_path_factory.mktemp("models")
    for file in files:
        (found / file.name).symlink_to(file)
    return found


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG, models_dir=folder) as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_sessions_on_an_architecture_equal_those_without_reuse(
    daemon: RunningDaemon, folder: Path, name: str
) -> None:
    other = next(each for each in NAMES if each != name)
    with Client(daemon.socket) as client:
        served = Served(client, name, other, folder)
        for check in SERVED.values():
            check(served)
    daemon.stop()
    daemon.start_again()
    with Client(daemon.socket) as client:
        served = Served(client, name, other, folder)
        for check in AFTER_A_RESTART.values():
            check(served)
    assert "worker.died" not in daemon.log

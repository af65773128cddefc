"""Start of processes from a thread with descriptors of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from inferd.daemon.workers.spawner import start_spawner
from inferd.testing import running_daemon
from tests.raw import RawClient


def write_and_fail(descriptors: Sequence[int]) -> list[str]:
    code = f"import os, sys; os.write({descriptors[0]}, b'passed'); sys.exit(7)"
    return [sys.executable, "-c", code]


@pytest.mark.asyncio
async def test_a_process_gets_its_descriptors_and_its_exit_is_noticed() -> None:
    reader, writer = os.pipe()
    with anyio.fail_after(20):
        process = await start_spawner().spawn(write_and_fail, os.environ, (writer,), 2)
        os.close(writer)
        assert await process.wait() == 7
    assert os.read(reader, 100) == b"passed"
    assert os.read(reader, 100) == b"", "no other process has the descriptor"
    os.close(reader)


@pytest.mark.asyncio
async def test_a_process_that_cannot_be_started_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await start_spawner().spawn(lambda _: ["/no/such/program"], os.environ, (), 2)


def blocked_signals(status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith("SigBlk:"))
    return int(line.split()[1], 16)


def test_the_spawner_gets_no_signal_and_workers_get_all() -> None:
    """A signal's handler in that thread could not wake the daemon, which would not stop."""
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        client.context()
        worker = client.call("models")["models"][0]["pid"]
        threads = Path(f"/proc/{daemon.pid}/task").glob("*/status")
        assert sum(blocked_signals(status) > 0 for status in threads) == 1
        assert blocked_signals(Path(f"/proc/{worker}/status")) == 0

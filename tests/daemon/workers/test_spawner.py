"""Start of processes from a thread with descriptors of its own."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import anyio
import psutil
import pytest

from inferd.backends.errors import LoadFailed
from inferd.daemon.workers.process import Spawner, start_spawner
from inferd.testing import running_daemon
from tests.processes import command_of, running_children
from tests.raw import RawClient
from tests.waiting import wait_until


def write_and_fail(descriptors: Sequence[int]) -> list[str]:
    code = f"import os, sys; os.write({descriptors[0]}, b'passed'); sys.exit(7)"
    return [sys.executable, "-c", code]


@pytest.mark.asyncio
async def test_a_process_gets_its_descriptors_and_its_exit_is_noticed() -> None:
    reader, writer = os.pipe()
    with anyio.fail_after(40):
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


@pytest.mark.asyncio
async def test_a_request_that_fails_in_the_thread_is_an_error_and_the_next_one_is_served() -> None:
    reader, writer = os.pipe()
    own = Spawner()
    with anyio.fail_after(40), own._socket:
        with pytest.raises(OSError, match="null byte"):
            await own.spawn(lambda _: ["a\0b"], os.environ, (), 2)
        with pytest.raises(OSError) as truncated:  # more descriptors than the thread accepts
            await own.spawn(lambda _: [sys.executable], os.environ, [2] * 20, 2)
        assert truncated.value.errno == errno.EMFILE
        process = await own.spawn(write_and_fail, os.environ, (writer,), 2)
        assert await process.wait() == 7
    os.close(writer)
    assert os.read(reader, 100) == b"passed"
    os.close(reader)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.asyncio
async def test_each_load_fails_once_the_thread_has_ended() -> None:
    def fail(_: Sequence[int]) -> list[str]:
        raise RuntimeError("a bug")

    own = Spawner()
    with anyio.fail_after(40), own._socket:
        for command in (fail, write_and_fail):
            with pytest.raises(LoadFailed, match="has ended"):
                await own.spawn(command, os.environ, (2,), 2)


@pytest.mark.asyncio
async def test_without_a_descriptor_for_its_exit_a_process_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with anyio.fail_after(40), pytest.raises(OSError, match="too many"):
        await start_spawner().spawn(lambda _: sleep, os.environ, (), 2)
    assert not [child for child in running_children() if sleep[-1] in command_of(child)]


@pytest.mark.asyncio
async def test_the_exit_of_a_process_that_was_not_ended_is_noticed_without_more_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with anyio.fail_after(40):
        process = await start_spawner().spawn(lambda _: sleep, os.environ, (), 2)
        monkeypatch.setattr("inferd.daemon.workers.process.QUIT_S", 0.0)
        monkeypatch.setattr("inferd.daemon.workers.process.KILLED_S", 0.0)
        monkeypatch.delattr(os, "pidfd_open")
        assert await process.wait() is None
        await process.wait_exited()
    assert not psutil.pid_exists(process.pid)


def blocks_signals(thread: Path) -> bool:
    """Return whether a thread blocks a signal."""
    try:
        lines = (thread / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    line = next(line for line in lines if line.startswith("SigBlk:"))
    return int(line.split()[1], 16) > 0


def test_the_spawner_gets_no_signal_and_workers_get_all() -> None:
    """A signal's handler in that thread could not wake the daemon, which would not stop."""
    with running_daemon() as daemon, RawClient(daemon.socket) as client:
        client.context()
        worker = client.call("models")["models"][0]["pid"]
        threads = Path(f"/proc/{daemon.pid}/task")
        # A thread blocks all signals while it starts another one.
        wait_until(lambda: sum(map(blocks_signals, threads.iterdir())) == 1)
        assert not blocks_signals(Path(f"/proc/{worker}"))

"""The exit status of servers that Ctrl-C ends, as of other commands, and of SIGTERM."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from inferd.testing import running_daemon
from tests.daemon.command_line import inferd_process
from tests.gateways.fleet.members import running_fleet

END_S_MAX = 60.0
BY_SIGNAL = pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=("ctrl-c", "sigterm")
)


def status_after(process: subprocess.Popen[bytes], number: signal.Signals) -> int:
    process.send_signal(number)
    return process.wait(END_S_MAX)


@BY_SIGNAL
def test_of_a_daemon(number: signal.Signals, status: int) -> None:
    with running_daemon() as daemon:
        assert daemon.process is not None
        assert status_after(daemon.process, number) == status
        assert not Path(daemon.socket).exists(), "it has ended in order"


@BY_SIGNAL
@pytest.mark.parametrize("command", ["nnrpc", "gateway"])
def test_of_a_gateway(command: str, number: signal.Signals, status: int) -> None:
    with running_daemon() as daemon:
        listen = daemon.directory / "gateway.sock"
        arguments = (command, "--listen", f"unix:{listen}")
        with inferd_process(*arguments, socket=daemon.socket) as process:
            assert process.stderr is not None and process.stderr.readline()
            assert status_after(process, number) == status
        assert not listen.exists(), "it has ended in order"


@BY_SIGNAL
def test_of_a_fleet(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with running_fleet(tmp_path, "", "a") as fleet:
        assert status_after(fleet.entry, number) == status
        assert status_after(fleet.relays["a"].process, number) == status

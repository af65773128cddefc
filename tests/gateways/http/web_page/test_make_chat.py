"""`make chat`: the page of a daemon of its own, which ends with the command."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import command_of
from tools import chat

NOISE_BYTES = 200_000
"""More than a pipe holds."""
NOISY = f"""\
import sys
print("a warning", file=sys.stderr)
print("serving HTTP on 127.0.0.1:7", file=sys.stderr)
print("x" * {NOISE_BYTES}, file=sys.stderr)
"""


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_page_is_served_until_the_command_ends(end: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "tools/chat.py", "--echo", "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        children: list[psutil.Process] = []
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            address = line.split()[2]
            assert address.startswith("http://127.0.0.1:") and str(port) not in address
            request = urllib.request.Request(address, headers={"Accept": "text/html"})
            with urllib.request.urlopen(request, timeout=30) as response:
                assert b"<title>inferd</title>" in response.read()
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(end)
            assert process.wait(30) == 0
            _, alive = psutil.wait_procs(children, timeout=60)
            assert alive == []
        finally:
            kill(children)
            process.kill()
            process.communicate()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_gateway_starts_leaves_no_process(end: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "tools/chat.py", "--echo", "--port", "0"])
    gateways: list[psutil.Process] = []
    try:
        chat = psutil.Process(process.pid)
        while not gateways:
            assert process.poll() is None
            children = chat.children()
            gateways = [child for child in children if "gateway" in " ".join(command_of(child))]
        process.send_signal(end)
        assert process.wait(30) == 0
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
    finally:
        kill(gateways)
        process.kill()
        process.wait()


def test_a_gateway_that_writes_more_than_a_pipe_holds_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "gateway"
    script.write_text(f"#!{sys.executable}\n{NOISY}")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with chat.running_gateway("unused", 1) as (process, address):
        assert address == "127.0.0.1:7"
        assert process.wait(30) == 0
    assert capfd.readouterr().err.count("x") == NOISE_BYTES

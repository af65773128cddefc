"""`make chat`: the page of a daemon of its own, which ends with the command."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_page_is_served_until_the_command_ends(end: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "tools/chat.py", "--echo", "--port", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
            _, alive = psutil.wait_procs(children, timeout=10)
            assert alive == []
        finally:
            process.kill()
            process.communicate()

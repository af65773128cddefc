"""A worker that can allocate no more memory: its turns continue in another worker."""

from __future__ import annotations

import resource
import subprocess

import psutil
import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.raw import RawClient

CONFIG = """
[models.m]
backend = "echo"
ctx-size = 200_000
[models.m.echo]
step_ms = 1
"""
TALE = "all the memory there is, and then some more. " * 2


def test_a_worker_without_memory_is_replaced_and_its_turn_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A forked worker has free memory left from the imports.
    monkeypatch.setattr(RunningDaemon, "_start_process", subprocess.Popen)
    with running_daemon(CONFIG) as daemon, RawClient(daemon.socket) as client:
        context, large = client.context("m"), client.context("m")
        client.set_input(large, b"x" * 20_000)
        client.set_input(large, b'{"n-predict": 3}', index=1)
        (found,) = client.call("show", name="m")["models"]
        number = client.begin_stream(context, TALE)
        worker = psutil.Process(found["pid"])
        worker.rlimit(resource.RLIMIT_AS, (1, 1))
        computing = client.start_request("compute", context=large)
        client.wait_result(number)
        assert client.streamed_text == TALE
        client.wait_result(computing)
        assert client.output(large) == b"xxx"
        assert "worker.died" in daemon.log
        (found,) = client.call("show", name="m")["models"]
        assert found["pid"] != worker.pid

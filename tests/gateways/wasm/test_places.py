"""Contexts of guests that wait until one of the daemon's places is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.wasm.driver import Driver
from tests.waiting import wait_until

CONFIG = "[daemon]\nsessions-max = 1\nidle-yield-ms = 3600000\n" + echo_model("echo")


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as running:
        yield running


def test_a_guest_s_context_waits_for_a_place(daemon: RunningDaemon, client: Client) -> None:
    opened = threading.Event()
    with Driver(client) as guest, Client(daemon.socket) as other:
        graph = other.load_by_name("echo")
        context = other.init_execution_context(graph)

        def open_context() -> None:
            guest.set_input(guest.context(), b"a text")
            opened.set()

        opening = threading.Thread(target=open_context)
        opening.start()
        try:
            wait_until(lambda: other.stats()["sessions_waiting"] == 1)
            assert not opened.is_set()
        finally:
            other.finalize_execution_context(context)
            opening.join()
        assert opened.is_set()
        assert guest.errors == []

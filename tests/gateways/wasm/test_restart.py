"""Restarts of the daemon and expired contexts, which a guest does not notice."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from inferd import Client, ConnectionLost
from inferd.gateways.guests import remote
from inferd.testing import RunningDaemon, running_daemon
from tests.gateways.restarts import CONFIG, TEXT, restart
from tests.gateways.wasm.driver import Driver
from tests.waiting import wait_until


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as running:
        yield running


def test_a_context_has_its_parameters_and_prompt_after_a_restart(
    daemon: RunningDaemon, client: Client
) -> None:
    with Driver(client) as guest:
        context = guest.context(config={"n-predict": 9})
        for settings in (b'{"n-predict":4}', b'{"stop":"l"}', b'{"stop":[]}'):
            assert guest.set_input(context, settings, 1) == 0
        guest.set_input(context, b"hello")
        restart(daemon)
        assert guest.metadata(context)["input_tokens"] == 7
        assert guest.call("compute", context) == 0
        assert guest.output(context) == b"hell"
        assert guest.errors == []


def test_the_next_client_has_the_label_of_the_first_one(daemon: RunningDaemon) -> None:
    with Client(daemon.socket, label="guest-1") as client, Driver(client) as guest:
        context = guest.context()
        restart(daemon)
        guest.set_input(context, b"hello")
        with Client(daemon.socket) as other:
            assert [s["label"] for s in other.sessions()] == ["guest-1"]


@pytest.mark.parametrize("call", ["compute", "compute_single"])
def test_an_output_can_be_read_after_a_restart(
    call: str, daemon: RunningDaemon, client: Client
) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"abc")
        while guest.call(call, context) == 0 and call != "compute":
            pass
        restart(daemon)
        assert guest.output(context) == b"abc"
        assert guest.metadata(context)["output_tokens"] == 4


def test_a_pulled_turn_continues_after_its_text(daemon: RunningDaemon, client: Client) -> None:
    with Driver(client) as guest:
        context = guest.context()
        guest.set_input(context, b"abc")
        assert guest.pull(context, 2) == b"ab"
        restart(daemon)
        # The daemon gets prompt and text so far as the prompt, which echo repeats from its start.
        assert guest.pull(context, 5) == b"abcab"
        assert guest.call("compute_single", context) == 100
        assert guest.output(context) == b"ab" + b"abcab"


@pytest.mark.parametrize("streams", [False, True])
def test_a_turn_that_is_interrupted_by_a_restart_ends_all_the_same(
    streams: bool, daemon: RunningDaemon, client: Client
) -> None:
    written: list[bytes] = []
    begun = threading.Event()

    def write(data: bytes) -> None:
        written.append(data)
        begun.set()

    with Driver(client, write_text=write) as guest, Client(daemon.socket) as watcher:
        context = guest.context("slow", {"stream-stdout": streams})
        guest.set_input(context, TEXT)

        def interrupt() -> None:
            if streams:
                begun.wait()
            else:
                wait_until(lambda: any(task["output_tokens"] for task in watcher.queue()))
            restart(daemon)

        thread = threading.Thread(target=interrupt)
        thread.start()
        assert guest.call("compute", context) == 0
        thread.join()
        if streams:
            text = guest.output(context)
            before = text[: (len(text) - len(TEXT)) // 2]
            assert b"".join(written) == text == before + TEXT + before
            assert 0 < len(before) < len(TEXT)
        else:
            assert guest.output(context) == TEXT


def test_unload_and_finalize_succeed_after_a_restart(daemon: RunningDaemon, client: Client) -> None:
    with Driver(client) as guest:
        graph = guest.load()
        first, second = guest.init(graph), guest.init(graph)
        guest.set_input(first, b"abc")
        guest.pull(first, 1)
        restart(daemon)
        assert guest.call("finalize_execution_context", second) == 0
        assert guest.call("unload", graph) == 0
        assert guest.output(first) == b"a"
        assert guest.init(guest.load()) == 2


def test_an_expired_context_is_opened_again() -> None:
    with (
        running_daemon("[daemon]\nidle_timeout_ms = 200\n") as daemon,
        Client(daemon.socket) as client,
        Driver(client) as guest,
    ):
        context = guest.context()
        guest.set_input(context, {"n-predict": 3})
        guest.set_input(context, b"abcdef")
        wait_until(lambda: not client.sessions())
        assert guest.call("compute", context) == 0
        assert guest.output(context) == b"abc"
        assert guest.errors == []


def test_a_daemon_that_stays_away_is_an_error_of_the_call(
    daemon: RunningDaemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "RECONNECT_S_MAX", 0.2)
    with Driver(client) as guest:
        context = guest.context()
        daemon.kill()
        assert guest.set_input(context, b"x") == 5
        assert isinstance(guest.errors[-1][1], ConnectionLost)
        daemon.start_again()
        assert guest.set_input(context, b"x") == 0

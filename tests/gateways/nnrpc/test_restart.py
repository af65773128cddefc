"""Restarts of the daemon under a gateway, which its clients do not notice."""

from __future__ import annotations

import grpc

from inferd import Client
from inferd.testing import RunningDaemon
from tests.gateways.nnrpc.driver import WasmEdge
from tests.gateways.restarts import CONFIG, TEXT, restart
from tests.waiting import wait_until

__all__ = ("CONFIG",)


def test_contexts_have_their_parameters_and_prompts_after_a_restart(
    daemon: RunningDaemon, guest: WasmEdge
) -> None:
    graph = guest.load(config='{"n-predict":4}')
    contexts = [guest.init(graph) for _ in range(4)]
    for context in contexts:
        guest.set_input(context, b"hello")
    guest.set_input(contexts[0], b'{"n-predict":2}', 1)
    restart(daemon)
    calls = [guest.begin("Compute", resource_handle=context) for context in contexts]
    for call in calls:
        call.result()
    assert [guest.output(c) for c in contexts] == [b"he", b"hell", b"hell", b"hell"]
    with Client(daemon.socket) as client:
        assert [model["leases"] for model in client.models() if model["name"] == "echo"] == [1]


def test_a_pulled_turn_continues_after_its_text(daemon: RunningDaemon, guest: WasmEdge) -> None:
    context = guest.context()
    guest.set_input(context, b"abc")
    assert guest.pull(context, 2) == b"ab"
    restart(daemon)
    # The daemon gets prompt and text so far as the prompt, which echo repeats from its start.
    assert guest.pull(context, 5) == b"abcab"
    assert guest.compute_single(context) == 100
    assert guest.output(context) == b"ab" + b"abcab"


def test_turns_that_a_restart_interrupts_end_all_the_same(
    daemon: RunningDaemon, guest: WasmEdge
) -> None:
    graph = guest.load("slow")
    contexts = [guest.init(graph) for _ in range(3)]
    for context in contexts:
        guest.set_input(context, TEXT)
    with Client(daemon.socket) as watcher:
        calls = [guest.begin("Compute", resource_handle=context) for context in contexts]
        wait_until(lambda: any(task["output_tokens"] for task in watcher.queue()))
    restart(daemon)
    for context, call in zip(contexts, calls, strict=True):
        call.result()
        assert guest.output(context) == TEXT


def test_a_client_leaves_while_the_daemon_is_away(daemon: RunningDaemon, path: str) -> None:
    with WasmEdge(path) as guest, WasmEdge(path) as other:
        for each in (guest, other):
            each.set_input(each.context(), b"hello")
        daemon.kill()
        call = guest.begin("Compute", resource_handle=0)
        guest.channel.close()
        assert call.exception().code() is grpc.StatusCode.CANCELLED
        daemon.start_again()
        assert other.compute(0) == 0 and other.output(0) == b"hello"
        with Client(daemon.socket) as client:
            assert len(client.sessions()) == 1

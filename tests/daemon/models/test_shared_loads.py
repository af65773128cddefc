"""Shared loads: one load for all callers, which get its progress and its result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from inferd.backends.errors import Cancelled
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient
from tests.waiting import wait_until

MODELS = echo_model("heavy", load_ms=3000) + echo_model("other")
PROGRESS = 4
"""An event's kind in a frame."""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(MODELS) as running:
        yield running


class Waiting:
    """A client that waits for the load of `heavy`, which has begun."""

    def __init__(self, daemon: RunningDaemon, stack: ExitStack):
        self.client = stack.enter_context(RawClient(daemon.socket))
        self.number = self.client.start_request("load_by_name", name="heavy", progress=True)
        self.client.events.append(self.client.read_message())

    @property
    def reported(self) -> list[float]:
        assert all(event[:2] == [PROGRESS, self.number] for event in self.client.events)
        return [event[2]["progress"] for event in self.client.events]

    def model(self) -> str:
        return str(self.client.wait_result(self.number)["model"])

    def error(self) -> Cancelled:
        with pytest.raises(Cancelled) as caught:
            self.client.wait_result(self.number)
        return caught.value


def workers(daemon: RunningDaemon) -> list[int]:
    return [child.pid for child in psutil.Process(daemon.pid).children()]


def state(client: RawClient) -> str:
    return str(client.call("show", name="heavy")["models"][0]["state"])


def test_all_callers_of_a_cold_model_share_one_load_and_get_its_progress(
    daemon: RunningDaemon,
) -> None:
    with ExitStack() as stack:
        waiting = [Waiting(daemon, stack) for _ in range(3)]
        (worker,) = workers(daemon)
        assert [w.model() for w in waiting] == ["heavy"] * 3
        for one in waiting:
            assert (
                one.reported == sorted(one.reported) and one.reported[0] < 1.0 == one.reported[-1]
            )
        assert workers(daemon) == [worker]


def test_a_caller_that_cancels_or_disconnects_does_not_end_a_shared_load(
    daemon: RunningDaemon,
) -> None:
    with ExitStack() as stack:
        stays, gives_up, vanishes = (Waiting(daemon, stack) for _ in range(3))
        (worker,) = workers(daemon)
        vanishes.client.socket.close()
        assert gives_up.client.call("cancel", request=gives_up.number) == {"cancelled": True}
        gives_up.error()
        assert state(gives_up.client) == "loading", "who gave up did not wait for its end"
        assert stays.model() == "heavy" and workers(daemon) == [worker]


def test_a_cancelled_load_is_reported_to_all_callers_and_is_not_a_failure(
    daemon: RunningDaemon,
) -> None:
    with ExitStack() as stack:
        waiting = [Waiting(daemon, stack) for _ in range(2)]
        client = stack.enter_context(RawClient(daemon.socket))
        client.call("unload_model", name="heavy", force=True)
        for error in (one.error() for one in waiting):
            assert error.message == "the load of 'heavy' was cancelled"
            assert "request the model again to load it" in error.hint
        assert state(client) == "cold" and workers(daemon) == []
        assert client.call("load_by_name", name="heavy")["model"] == "heavy"


def test_a_load_delays_neither_new_connections_nor_other_models() -> None:
    """The load takes longer than all else on a busy machine; other tests wait for its end."""
    models = echo_model("heavy", load_ms=60_000) + echo_model("other")
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(models))
        waiting = Waiting(daemon, stack)
        client = stack.enter_context(RawClient(daemon.socket))
        context = client.context("other")
        assert client.call("chat", context=context, prompt="now", raw=True)["text"] == b"now"
        assert state(client) == "loading"
        assert not waiting.client.has_answer(waiting.number)


@pytest.mark.parametrize("call", ["chat", "stream", "embed", "compute"])
def test_turns_of_a_model_that_is_unloaded_by_force_are_cancelled_by_an_operator(
    call: str,
) -> None:
    with (
        running_daemon(echo_model("m", step_ms=100, slots=1)) as daemon,
        RawClient(daemon.socket) as client,
        RawClient(daemon.socket) as operator,
    ):
        graph = client.call("load_by_name", name="m")["graph"]
        context = client.call("init_execution_context", graph=graph)["context"]
        waiting = client.call("init_execution_context", graph=graph)["context"]
        params: dict[str, Any] = {"context": context, "prompt": "abc " * 200}
        if call == "embed":
            params = {"graph": graph, "texts": ["abc " * 900] * 8}
        elif call == "compute":
            client.set_input(context, b"abc " * 200)
            params = {"context": context}
        numbers = [client.start_request(call, **params)]
        numbers.append(client.start_request("chat", context=waiting, prompt="next " * 50))
        wait_until(lambda: len(operator.call("queue")["tasks"]) >= 2)
        operator.call("unload_model", name="m", force=True)
        for number in numbers:
            with pytest.raises(Cancelled, match="an operator unloaded 'm'") as caught:
                client.wait_result(number)
            assert caught.value.data["by"] == "operator"
        assert client.call("chat", context=waiting, prompt="again")["text"] == b"again"

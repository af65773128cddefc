"""The call `park` over a real socket."""

from __future__ import annotations

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.testing import RunningDaemon
from tests.daemon.metrics.scraping import until
from tests.raw import RawClient

CONFIG = """
[models.slow]
backend = "echo"
slots = 1
[models.slow.echo]
step_ms = 10
"""
LONG, SHORT = "so long a text " * 12, "a short one"


def state(client: RawClient, context: int) -> str:
    tasks = client.call("queue")["tasks"]
    return next((str(t["state"]) for t in tasks if t["context"] == context), "none")


def test_a_parked_turn_yields_to_another_and_both_are_complete(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client, RawClient(daemon.socket) as operator:
        one, other = client.context("slow"), client.context("slow")
        turns = [
            client.start_request("chat", context=c, prompt=p)
            for c, p in ((one, LONG), (other, SHORT))
        ]
        until(
            daemon, lambda f: f("num_requests_running", model_name="slow", priority="normal") == 1
        )
        assert (state(operator, one), state(operator, other)) == ("running", "waiting")

        assert operator.call("park", context=one) == {"parked": True}
        assert client.wait_result(turns[1])["text"] == SHORT.encode()
        assert not client.has_answer(turns[0]), "the longer one was first, and is now second"
        done = client.wait_result(turns[0])
        assert done["text"] == LONG.encode() and done["metadata"]["parks"] == 1


def test_nothing_is_parked_without_running_and_waiting_turns(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        context = client.context("slow")
        assert client.call("park", context=context) == {"parked": False}
        turn = client.start_request("stream", context=context, prompt=SHORT, credit=1)
        assert client.read_message()[0] == 4
        assert client.call("park", context=context) == {"parked": False}
        client.call("cancel", request=turn)
        with pytest.raises(InvalidArgument):
            client.call("park", context=context + 1000)

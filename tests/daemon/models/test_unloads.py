"""Unloads by an operator: leases without work may end, and work is not interrupted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferd.backends.errors import Busy
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.raw import RawClient


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(echo_model("m") + echo_model("slow", step_ms=20)) as running:
        yield running


def state(client: RawClient, model: str) -> str:
    return str(client.call("show", name=model)["models"][0]["state"])


def test_a_lease_that_ends_meanwhile_does_not_keep_a_model(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client:
        graphs = [client.call("load_by_name", name="m")["graph"] for _ in range(2)]
        # The requests of a connection begin in their order.
        unloading = client.start_request("unload_model", name="m")
        for graph in graphs:
            client.call("unload", graph=graph, keep=True)
        client.wait_result(unloading)
        assert state(client, "m") == "cold"


def test_a_lease_that_goes_on_keeps_a_model(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client, RawClient(daemon.socket) as operator:
        graph = client.call("load_by_name", name="m")["graph"]
        with pytest.raises(Busy, match="is in use") as caught:
            operator.call("unload_model", name="m")
        assert caught.value.data["leases"] == 1 and state(operator, "m") == "ready"
        operator.call("unload_model", name="m", force=True)
        assert state(operator, "m") == "cold"
        client.call("unload", graph=graph)


def test_a_turn_keeps_its_model(daemon: RunningDaemon) -> None:
    with RawClient(daemon.socket) as client, RawClient(daemon.socket) as operator:
        context = client.context("slow")
        turn = client.begin_stream(context, "a text of some words " * 20)
        with pytest.raises(Busy, match="is in use"):
            operator.call("unload_model", name="slow")
        client.call("cancel", request=turn)

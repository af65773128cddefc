"""Bounds of an entry: unread replies, connections, requests under way, garbage on its socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from inferd import Client
from inferd.backends.errors import Busy
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.raw import Closed, RawClient
from tests.waiting import wait_until

CONNECTIONS_MAX = 8
REPLIES = 80
TEXT = "x" * 200_000
CONFIG = echo_model("echo", ctx_size=300_000) + echo_model("lazy", load_ms=1500)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    more = f"connections-max = {CONNECTIONS_MAX}\n"
    folder = tmp_path_factory.mktemp("fleet")
    with running_fleet(folder, CONFIG, "a", more=more) as running:
        yield running


@pytest.mark.process
def test_a_client_that_reads_late_gets_all_replies_and_delays_nobody(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket) as raw, Client(fleet.socket) as other:
        graph = raw.call("load_by_name", name="echo")["graph"]

        def send() -> None:
            for _ in range(REPLIES):
                raw.start_request("tokenize", graph=graph, text=TEXT)

        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(20):
            assert other.models(), "other clients are served meanwhile"
        for number in range(2, REPLIES + 2):  # the first request loaded the model
            assert len(raw.wait_result(number)["tokens"]) >= len(TEXT)
        sender.join()


@pytest.mark.process
def test_connections_have_places(fleet: RunningFleet) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(RawClient(fleet.socket)) for _ in range(CONNECTIONS_MAX)]
        for client in held:
            client.call("models")
        with RawClient(fleet.socket) as refused:
            with pytest.raises(Busy) as caught:
                refused.call("models")
            assert caught.value.data["connections_max"] == CONNECTIONS_MAX
        held[0].socket.close()

        def connects() -> bool:
            with RawClient(fleet.socket) as client:
                try:
                    return bool(client.call("models"))
                except Busy:
                    return False

        wait_until(connects)


@pytest.mark.process
def test_requests_under_way_are_bounded(fleet: RunningFleet) -> None:
    with RawClient(fleet.socket) as raw:
        most = raw.server_hello[1]["limits"]["requests_max"]
        numbers = [raw.start_request("load_by_name", name="lazy") for _ in range(most + 1)]
        with pytest.raises(Busy) as caught:
            raw.wait_result(numbers[-1])
        assert caught.value.data["requests_max"] == most
        assert len({raw.wait_result(number)["graph"] for number in numbers[:-1]}) == most


@pytest.mark.process
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x01\0\0\0\xc1"])
def test_garbage_ends_its_connection_alone(fleet: RunningFleet, data: bytes) -> None:
    with RawClient(fleet.socket) as other, RawClient(fleet.socket) as raw:
        raw.send_bytes(data)
        kind, error = raw.read_message()
        assert kind == 6 and error["name"] in ("ProtocolError", "TooLarge")
        with pytest.raises(Closed):
            raw.read_message()
        raw.start_request("models")  # no BrokenPipeError
        assert other.call("models")["models"]

"""Turns that wait, are refused, fail late, or lose their client."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import openai
import psutil
import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.conftest import HELD
from tests.gateways.http.driver import RunningGateway, gateway
from tests.waiting import wait_until

CONFIG = "".join(
    (
        echo_model("echo"),
        echo_model("slow", step_ms=50, slots=1),
        echo_model("late", load_ms=2000),
        echo_model("stuck", load_ms=600_000),
        echo_model("broken", fail_at_step=6),
    )
)
OPTIONS: tuple[str, ...] = ()
LONG = {"prompt": "x" * 3000, "max_tokens": 3000}


class Request:
    """A streamed request, read line by line."""

    def __init__(self, running: RunningGateway, body: dict[str, Any], path: str = "completions"):
        self.connection = HTTPConnection(running.host, running.port, timeout=60)
        headers = {"Content-Type": "application/json"}
        body = {"stream": True, **body}
        self.connection.request("POST", f"/v1/{path}", json.dumps(body), headers)

    def __enter__(self) -> Request:
        self.response = self.connection.getresponse()
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.response.close()

    def lines(self) -> Iterator[str]:
        while line := self.response.readline():
            if line.strip():
                yield line.decode().strip()


def begun(request: Request) -> Iterator[str]:
    """Wait for the first event of a request, whose turn then runs, and return the further lines."""
    lines = request.lines()
    next(line for line in lines if line.startswith("data"))
    return lines


def running(client: Client, model: str = "slow") -> list[Any]:
    return [task for task in client.queue() if task["model"] == model]


def test_a_turn_that_waits_sends_its_place_as_comments(
    http: RunningGateway, client: Client
) -> None:
    with Request(http, {"model": "slow", **LONG}) as first:
        begun(first)
        with Request(http, {"model": "slow", "prompt": "y", "priority": "low"}) as second:
            lines = second.lines()
            place = next(line for line in lines if line != ": waiting")
            assert re.match(r": waiting, place 1 of 1(, starts in \d+\.\d s)?$", place)
            first.connection.close()
            first.response.close()
            rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(next(line for line in rest if line.startswith("data"))[6:])["choices"]


def test_a_failed_answer_of_several_fails_the_request(http: RunningGateway, client: Client) -> None:
    with (
        openai.OpenAI(base_url=f"{http.url}/v1", api_key="none", max_retries=0) as api,
        ThreadPoolExecutor(1) as threads,
    ):
        short = "x" * 40
        whole = threads.submit(
            lambda: api.completions.create(model="slow", prompt=short, max_tokens=40, n=2)
        )
        wait_until(lambda: len(running(client)) == 2)
        assert client.cancel(running(client)[1]["context"])
        with pytest.raises(openai.InternalServerError) as caught:
            whole.result()
    assert caught.value.code == "cancelled"


def test_a_turn_whose_model_is_loaded_sends_comments(http: RunningGateway) -> None:
    with Request(http, {"model": "late", "prompt": "y"}) as request:
        lines = list(request.lines())
    assert lines[0] == ": waiting" and lines[-1] == "data: [DONE]"


def test_checks_of_lost_clients_delay_nobody(http: RunningGateway) -> None:
    """Each takes 2 s of CPU time, and they run one after the other."""
    schema = {"json_schema": {"type": "integer", "multipleOf": 9999991}}
    lost = [Request(http, {"model": "stuck", "prompt": "x", **schema}) for _ in range(24)]
    with Request(http, {"model": "late", "prompt": "y"}):
        pass  # the gateway has begun the requests that came before
    for request in lost:
        request.connection.close()
    began = time.monotonic()
    with Request(http, {"model": "stuck", "prompt": "y"}) as other:
        assert next(other.lines()) == ": waiting"
    assert time.monotonic() - began < 16


def test_a_full_queue_is_503_with_the_time_to_retry() -> None:
    config = "[daemon]\nsessions-max = 1\nsessions-waiting-max = 1\n"
    with (
        running_daemon(config + echo_model("slow", step_ms=50)) as daemon,
        gateway(daemon) as other,
        Client(daemon.socket) as client,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as own,
        Request(other, {"model": "slow", **LONG}) as first,
    ):
        begun(first)
        with Request(other, {"model": "slow", **LONG}):
            wait_until(lambda: client.stats()["sessions_waiting"] == 1)
            with pytest.raises(openai.InternalServerError) as caught:
                own.completions.create(model="slow", prompt="z")
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "overloaded"


def test_a_late_failure_is_an_error_in_the_stream(api: openai.OpenAI) -> None:
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in api.completions.create(model="broken", prompt="hello you", stream=True):
            text += chunk.choices[0].text
    assert "hello you".startswith(text)
    assert not isinstance(caught.value, openai.APIStatusError)
    body: Any = caught.value.body
    assert body["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_turn(
    http: RunningGateway, client: Client, stream: bool
) -> None:
    request = Request(http, {"model": "slow", **LONG, "stream": stream})
    wait_until(lambda: running(client))
    request.connection.close()
    wait_until(lambda: not running(client))
    assert not [each for each in client.sessions() if each["model"] == "slow"]


def test_a_client_that_disconnects_leaves_the_queue(http: RunningGateway, client: Client) -> None:
    with Request(http, {"model": "slow", **LONG}) as first:
        begun(first)
        waiting = Request(http, {"model": "slow", "prompt": "y"})
        wait_until(lambda: len(running(client)) == 2)
        waiting.connection.close()
        wait_until(lambda: len(running(client)) == 1)
    wait_until(lambda: not running(client))


def test_a_slow_reader_stops_only_its_own_turn(
    daemon: RunningDaemon, api: openai.OpenAI, client: Client
) -> None:
    """Its turn stops when the buffers are full; the gateway ends it after a time."""
    with gateway(daemon, "--receive-timeout", "1") as other:
        body = json.dumps(
            {
                "model": "echo",
                "prompt": ["x" * 4000] * 8,
                "n": 4,
                "max_tokens": 4000,
                "stream": True,
                "logprobs": 5,
            }
        )
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((other.host, other.port))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {other.address}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall((head + body).encode())
            wait_until(lambda: running(client, "echo"))
            done = api.completions.create(model="echo", prompt="hi")
            assert done.choices[0].text == "hi"
            wait_until(lambda: not running(client, "echo"))
            port, process = sock.getsockname()[1], psutil.Process(other.process.pid)
            wait_until(lambda: not _connections(process, port))


def _connections(process: psutil.Process, port: int) -> list[Any]:
    """Return the process's connections with a client's port."""
    return [each for each in process.net_connections() if each.raddr and each.raddr.port == port]


def accepts(running: RunningGateway) -> bool:
    with Request(running, {"model": "echo", "prompt": "x"}) as request:
        return bool(request.response.status == 200)


def test_requests_beyond_the_maximum_are_refused_at_once(
    daemon: RunningDaemon, client: Client
) -> None:
    with gateway(daemon, "--requests-max", "1") as other:
        with Request(other, {"model": "slow", **LONG}) as first:
            begun(first)
            with Request(other, {"model": "echo", "prompt": "x"}) as refused:
                assert refused.response.status == 503
                assert refused.response.headers["Retry-After"]
                assert "requests" in json.loads(refused.response.read())["error"]["message"]
        wait_until(lambda: not running(client))
        wait_until(lambda: accepts(other))  # soon after its turn has ended


def test_a_session_has_one_request_at_a_time(http: RunningGateway, client: Client) -> None:
    body = {
        "model": "slow",
        "messages": [{"role": "user", "content": "x" * 1000}],
        "session_id": "diary",
    }
    with Request(http, body, "chat/completions") as first:
        begun(first)
        with Request(http, body, "chat/completions") as second:
            assert second.response.status == 409
            assert json.loads(second.response.read())["error"]["code"] == "session_busy"
    wait_until(lambda: not running(client))


def test_a_session_can_be_used_as_soon_as_its_stream_has_ended(http: RunningGateway) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "echo", "messages": messages, "session_id": "quick"}
    for _ in range(10):
        with Request(http, body, "chat/completions") as request:
            assert list(request.lines())[-1] == "data: [DONE]"


def test_the_gateway_waits_for_a_daemon_that_restarts() -> None:
    def complete(prompt: str) -> str:
        return str(own.completions.create(model="echo", prompt=prompt).choices[0].text)

    with (
        RunningDaemon() as daemon,
        gateway(daemon) as other,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as own,
        ThreadPoolExecutor(1) as pool,
    ):
        assert complete("a") == "a"
        daemon.stop()
        answer = pool.submit(complete, "b")
        daemon.start_again()
        assert answer.result() == "b"


def test_without_a_daemon_a_request_is_503(daemon: RunningDaemon) -> None:
    class Nowhere:
        socket = "/nonexistent/inferd.sock"

    with (
        gateway(Nowhere(), *HELD) as other,
        Request(other, {"model": "echo", "prompt": "x"}) as request,
    ):
        assert request.response.status == 503
        assert "inferd start" in json.loads(request.response.read())["error"]["message"]

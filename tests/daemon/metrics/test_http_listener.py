"""The HTTP listener: its answers, bounds and failures."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections.abc import Iterator

import pytest

from inferd import Client
from inferd.ipc.metrics_listener import CONNECTIONS_MAX, HEAD_BYTES_MAX, REQUEST_TIMEOUT_S
from inferd.testing import running_daemon
from tests.daemon.manager import manager_of, serving
from tests.daemon.metrics.scraping import ask, connect, scrape, scrape_metrics, where_of
from tests.daemon.service.test_components import check, part
from tests.raw import RawClient

SECONDS_MAX = 60.0


@pytest.fixture(scope="module")
def where() -> Iterator[str]:
    with running_daemon() as daemon:
        yield where_of(daemon)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"DELETE /health HTTP/1.1\r\n\r\n", 405),
        (b"\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"GET /metrics SPDY/3\r\n\r\n", 400),
        (b"\x16\x03\x01 \xff\xfe\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * HEAD_BYTES_MAX + b"\r\n", 431),
        (b"x" * (HEAD_BYTES_MAX + 1), 431),
    ],
)
def test_each_request_has_its_answer(where: str, request_: bytes, status: int) -> None:
    answered, headers, body = ask(where, request_)
    assert answered == status
    assert int(headers["Content-Length"]) == len(body) > 0
    assert headers["Connection"] == "close"
    assert ("Allow" in headers) == (status == 405)


def test_head_has_the_headers_alone(where: str) -> None:
    status, headers, body = ask(where, b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert (status, body) == (200, b"") and int(headers["Content-Length"]) > 1000


def test_a_request_that_comes_byte_by_byte_is_answered(where: str) -> None:
    with connect(where) as sock:
        for byte in b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n":
            sock.sendall(bytes([byte]))
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")


def test_an_incomplete_request_gets_an_error(where: str) -> None:
    with connect(where) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_large_body_does_not_take_the_answer_back(where: str) -> None:
    head = b"POST /metrics HTTP/1.1\r\nContent-Length: 60000\r\n\r\n"
    assert ask(where, head + b"x" * 60_000)[0] == 405


def test_a_surplus_connection_is_refused_and_a_silent_one_closed(where: str) -> None:
    silent = [connect(where) for _ in range(CONNECTIONS_MAX)]
    try:
        with connect(where) as late:
            assert late.recv(1000).startswith(b"HTTP/1.1 503 ")
        for sock in silent:
            sock.settimeout(REQUEST_TIMEOUT_S + SECONDS_MAX)
            assert sock.recv(1) == b""  # the time is over
        assert "inferd_build_info" in scrape(where)
    finally:
        for sock in silent:
            sock.close()


def test_health_names_failing_components_and_the_shutdown() -> None:
    slow = '[models.s]\nbackend = "echo"\n[models.s.echo]\nstep_ms = 20\n'
    with running_daemon(slow) as daemon, RawClient(daemon.socket) as client:
        where = where_of(daemon)
        health = b"GET /health HTTP/1.1\r\n\r\n"
        assert json.loads(ask(where, health)[2]) == {"status": "ok", "failing": []}
        context = client.context("s")
        client.start_request("stream", context=context, prompt="x" * 200)
        client.events.append(client.read_message())  # a turn without a token would not be awaited
        threading.Thread(target=daemon.stop).start()
        status, answer = 200, {}
        while status == 200:
            status, _, body = ask(where, health)
            answer = json.loads(body)
        assert (status, answer["status"]) == (503, "draining")
        assert scrape_metrics(daemon)("draining") == 1
        client.start_request("cancel", context=context)


def test_a_taken_port_fails_alone_until_it_is_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with running_daemon(metrics=where) as daemon:
            check(daemon, "metrics", f"{where}: Address already in use")
            assert "another port" in part(daemon, "metrics")["remedy"]
            with Client(daemon.socket) as client:
                assert client.stats()["metrics_address"] is None
            with manager_of(daemon) as manager:
                taken.close()
                manager.serves()
            assert "inferd_build_info" in scrape(where)
            assert part(daemon, "metrics")["up"]
            with Client(daemon.socket) as client:
                assert client.stats()["metrics_address"] == where


def test_systemd_is_notified_of_a_taken_port_with_readiness() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with running_daemon(metrics=where) as daemon:
            daemon.stop()
            path = str(daemon.directory / "notify")
            with manager_of(daemon) as manager, serving(daemon, {"NOTIFY_SOCKET": path}):
                answer = manager.until(lambda m: "READY" in m)["STATUS"]
    assert answer == f"serving; degraded: metrics ({where}: Address already in use)"


def test_a_unix_socket_is_private_taken_over_when_stale_and_removed() -> None:
    with running_daemon() as daemon:
        path = daemon.directory / "metrics.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        daemon.kill()
        assert path.is_socket()
        daemon.start_again()
        assert "inferd_build_info" in scrape(str(path))
        daemon.stop()
        assert not path.exists()


def test_a_unix_socket_that_another_daemon_serves_is_not_taken_over() -> None:
    with running_daemon() as one:
        path = where_of(one)
        with running_daemon(metrics=path) as other:
            check(other, "metrics", f"{path}: Address already in use")
        assert "inferd_build_info" in scrape(path)

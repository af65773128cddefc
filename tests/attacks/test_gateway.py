"""Clients of a gateway who keep its connections, beside others with keys."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd import Client
from inferd.ipc.server.descriptors import raise_open_files_limit
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import (
    CALL_S_MAX,
    RunningGateway,
    gateway,
    keyed_gateway,
    new_certificate,
    tls_options,
)
from tests.waiting import wait_until

SESSIONS_MAX = 24
CONFIG = f"[daemon]\nsessions-max = {SESSIONS_MAX}\n" + echo_model(
    "echo", slots=8, ctx_size=8 * 8192
)
CLIENTS_MAX, ROUNDS = 64, 10
RENEWAL_S = 0.002
"""The pause between two renewals. Without one they would only use up the tests' own process."""
SILENT = CLIENTS_MAX + 6
MANY = ("--clients-max", str(CLIENTS_MAX))
KEYS = ("ada", "bob", "eve")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/api/generate": {"prompt": "hi", "stream": False},
}
SMALL = 16
"""Connections, of which 14 are places; one caller may have 13 of them."""


@pytest.fixture(scope="module", autouse=True)
def many_files() -> None:
    raise_open_files_limit()


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(CONFIG) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


def opened(running: RunningGateway) -> socket.socket:
    return socket.create_connection((running.host, running.port), timeout=CALL_S_MAX)


class User:
    """A client that keeps one connection, or opens one for each request."""

    def __init__(self, running: RunningGateway, key: str = ""):
        self.connection = HTTPConnection(running.host, running.port, timeout=CALL_S_MAX)
        self.headers = {"Content-Type": "application/json"}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"

    def complete(self, path: str = "/v1/completions") -> tuple[int, Any]:
        """Return the status and the JSON of a whole answer."""
        body = json.dumps({"model": "echo", **BODIES[path]})
        self.connection.request("POST", path, body, self.headers)
        with self.connection.getresponse() as response:
            return response.status, json.loads(response.read())

    def list_models(self) -> int:
        """Return the status of a request without a body; its refusal leaves the connection open."""
        self.connection.request("GET", "/v1/models", headers=self.headers)
        with self.connection.getresponse() as response:
            response.read()
            return response.status

    @property
    def port(self) -> int:
        """The port by which to recognize the connection, or 0 without one."""
        sock = self.connection.sock
        return 0 if sock is None else int(sock.getsockname()[1])

    def close(self) -> None:
        self.connection.close()


@contextmanager
def user(running: RunningGateway, key: str = "") -> Iterator[User]:
    found = User(running, key)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def renewing_silent_connections(running: RunningGateway) -> Iterator[threading.Event]:
    """Keep more silent connections open than the gateway permits, and renew the oldest one again
    and again. Set the event when all of them have been renewed once.
    """
    renewed, ended = threading.Event(), threading.Event()

    def attack() -> None:
        with ExitStack() as stack:
            held = [stack.enter_context(opened(running)) for _ in range(SILENT)]
            number = 0
            while not ended.wait(RENEWAL_S):
                held[number % SILENT].close()
                held[number % SILENT] = stack.enter_context(opened(running))
                number += 1
                if number == SILENT:
                    renewed.set()

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield renewed
    finally:
        ended.set()
        thread.join()


def test_silent_connections_shut_out_nobody_who_has_a_key(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    with (
        keyed_gateway(daemon, tmp_path, KEYS, *MANY) as (running, keys),
        user(running, keys["ada"]) as ada,
    ):
        assert ada.complete()[0] == 200
        port = ada.port
        with renewing_silent_connections(running) as renewed:
            rounds = 0
            while not renewed.is_set() or rounds < ROUNDS:
                assert ada.complete()[0] == 200
                with user(running, keys["bob"]) as bob:
                    assert bob.complete()[0] == 200
                rounds += 1
        assert ada.port == port, "its connection stayed open"


def test_silent_connections_shut_out_nobody_without_keys(daemon: RunningDaemon) -> None:
    with gateway(daemon, *MANY) as running, renewing_silent_connections(running) as renewed:
        rounds = 0
        while not renewed.is_set() or rounds < ROUNDS:
            with user(running) as other:
                assert other.complete()[0] == 200
            rounds += 1


def streaming(running: RunningGateway, key: str, stack: ExitStack, **more: Any) -> socket.socket:
    """Begin a stream of 2 MB, and read only its status."""
    body = {"model": "echo", "prompt": "x" * 4000, "max_tokens": 4000, "logprobs": 5}
    text = json.dumps({**body, "stream": True, **more})
    sock = stack.enter_context(socket.socket())
    sock.settimeout(CALL_S_MAX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((running.host, running.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {running.address}\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Length: {len(text)}\r\n\r\n"
    sock.sendall((head + text).encode())
    assert (found := sock.recv(4096)).startswith(b"HTTP/1.1 200 "), found
    return sock


@pytest.mark.timeout(300)  # on a busy machine the streams take a minute
def test_streams_that_are_not_read_shut_out_no_other_key(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    """They would keep all sessions of the daemon for `--receive-timeout`."""
    with (
        keyed_gateway(daemon, tmp_path, KEYS, "--receive-timeout", "600") as (running, keys),
        ExitStack() as stack,
    ):
        for _ in range(SESSIONS_MAX):
            streaming(running, keys["ada"], stack)
        with user(running, keys["bob"]) as bob:
            assert bob.complete()[0] == 200
        wait_until(lambda: len(client.queue(all_users=True)) == 16, 200)
    wait_until(lambda: not client.queue(all_users=True))


def stalled(running: RunningGateway, key: str, stack: ExitStack, count: int) -> None:
    """Begin streams that are not read, each on a connection of its own."""
    for _ in range(count):
        streaming(running, key, stack)


def test_connections_with_requests_stay_and_others_get_an_error_in_their_form(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    """The streams do not end, because their clients do not read."""
    options = ("--clients-max", str(SMALL), "--receive-timeout", "600")
    with (
        keyed_gateway(daemon, tmp_path, KEYS, *options) as (running, keys),
        user(running, keys["eve"]) as eve,
        ExitStack() as stack,
    ):
        stalled(running, keys["ada"], stack, 10)
        last = ExitStack()
        with last:
            stalled(running, keys["bob"], stack, 3)
            stalled(running, keys["bob"], last, 1)
            status, error = eve.complete("/v1/messages")
            assert (status, error["type"]) == (503, "error")
            assert "--clients-max" in error["error"]["message"]
            status, error = eve.complete("/api/generate")
            assert status == 503 and isinstance(error["error"], str)
            assert len(client.queue(all_users=True)) == 14
        wait_until(lambda: len(client.queue(all_users=True)) == 13)
        wait_until(lambda: eve.complete("/v1/messages")[0] == 200)
    wait_until(lambda: not client.queue(all_users=True))


def test_one_key_leaves_connections_to_others(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    options = ("--clients-max", str(SMALL), "--receive-timeout", "600")
    with (
        keyed_gateway(daemon, tmp_path, KEYS, *options) as (running, keys),
        user(running, keys["ada"]) as ada,
        user(running, keys["bob"]) as bob,
        ExitStack() as stack,
    ):
        stalled(running, keys["ada"], stack, 13)
        status, error = ada.complete()
        assert status == 429 and "13 connections" in error["error"]["message"]
        assert bob.complete()[0] == 200
    wait_until(lambda: not client.queue(all_users=True))


def test_the_longest_idle_connection_of_a_key_is_closed_for_another(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    with (
        keyed_gateway(daemon, tmp_path, KEYS, "--clients-max", str(SMALL)) as (running, keys),
        ExitStack() as stack,
    ):
        users = [stack.enter_context(user(running, keys["ada"])) for _ in range(14)]
        for each in [*users[:13], users[0], users[13]]:
            assert each.complete()[0] == 200
        assert users[1].connection.sock.recv(1) == b""
        port = users[0].port
        assert users[0].complete()[0] == 200 and users[0].port == port


def test_an_unknown_key_takes_no_place(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Nor does one that is no longer known keep its place."""
    with (
        keyed_gateway(daemon, tmp_path, KEYS, "--clients-max", str(SMALL)) as (running, keys),
        ExitStack() as stack,
    ):
        former = [stack.enter_context(user(running, keys["ada"])) for _ in range(13)]
        for each in former:
            assert each.list_models() == 200
            each.headers["Authorization"] = "Bearer removed"
            assert each.list_models() == 401
        strangers = [stack.enter_context(user(running, "unknown")) for _ in range(3)]
        assert [each.list_models() for each in strangers] == [401] * 3
        with user(running, keys["bob"]) as bob:
            assert bob.complete()[0] == 200
        assert former[0].connection.sock.recv(1) == b"", "the oldest without a known key"


def test_connections_without_a_handshake_shut_out_nobody(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """They count from the moment at which they are accepted."""
    certificate, key = new_certificate(tmp_path)
    context = ssl.create_default_context(cafile=certificate)
    options = ("--clients-max", "64", *tls_options(certificate, key))
    with keyed_gateway(daemon, tmp_path, KEYS, *options) as (running, keys), ExitStack() as stack:
        ada, bob = (stack.enter_context(user(running, keys[name])) for name in ("ada", "bob"))
        for each in (ada, bob):
            each.connection = HTTPSConnection(running.host, running.port, context=context)
        assert ada.complete()[0] == 200
        port, process = ada.port, psutil.Process(running.process.pid)
        silent = [stack.enter_context(opened(running)) for _ in range(300)]
        wait_until(lambda: len(clients_of(process, running.port)) == 64)
        assert ada.complete()[0] == 200 and ada.port == port
        assert bob.complete()[0] == 200
        for sock in silent[:200]:
            assert sock.recv(1) == b""
        plain = silent[-1]
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):
            while plain.recv(4096):
                pass
        assert ada.complete()[0] == 200
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(CALL_S_MAX) == 0


def clients_of(process: psutil.Process, port: int) -> list[Any]:
    """Return the open connections to a port of a process."""
    found = process.net_connections("tcp")
    return [each for each in found if each.raddr and each.laddr.port == port]


def test_a_handshake_has_a_time(daemon: RunningDaemon, tmp_path: Path) -> None:
    options = ("--receive-timeout", "0.3", *tls_options(*new_certificate(tmp_path)))
    with gateway(daemon, *options) as running, opened(running) as sock:
        process = psutil.Process(running.process.pid)
        assert sock.recv(1) == b""
        wait_until(lambda: not clients_of(process, running.port))

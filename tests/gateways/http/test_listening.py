"""The addresses on which a gateway listens."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from inferd.backends.errors import InvalidArgument
from inferd.gateways.http.listening import LOOPBACKS, Listener, parse_address
from inferd.testing import RunningDaemon
from tests.gateways.http.driver import CALL_S_MAX, gateway

CONFIG = ""
BOTH = {"127.0.0.1", "::1"}
Resolver = Callable[..., list[tuple[Any, ...]]]
resolve: Resolver = socket.getaddrinfo


@contextmanager
def listening(text: str) -> Iterator[Listener]:
    listener = Listener(parse_address(text))
    try:
        yield listener
    finally:
        listener.close()


def hosts_of(listener: Listener) -> list[str]:
    return [sock.getsockname()[0] for sock in listener.sockets]


@pytest.mark.parametrize("name", ["localhost", "LocalHost", "localhost."])
def test_localhost_listens_on_both_addresses_and_one_port(name: str) -> None:
    with listening(f"{name}:0") as listener:
        assert set(hosts_of(listener)) == BOTH
        [port] = {sock.getsockname()[1] for sock in listener.sockets}
        assert listener.name == f"{name}:{port}"
        for host in BOTH:
            socket.create_connection((host, port), timeout=CALL_S_MAX).close()


@pytest.mark.parametrize(
    ("text", "hosts", "name"),
    [
        ("127.0.0.1:0", ["127.0.0.1"], "127.0.0.1"),
        ("[::1]:0", ["::1"], "[::1]"),
        ("127.0.0.2:0", ["127.0.0.2"], "127.0.0.2"),
        ("[::]:0", ["::"], "[::]"),
    ],
)
def test_an_address_is_listened_on_alone(text: str, hosts: list[str], name: str) -> None:
    with listening(text) as listener:
        assert hosts_of(listener) == hosts
        assert listener.name == f"{name}:{listener.sockets[0].getsockname()[1]}"


def test_a_name_listens_on_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(host: str, *args: Any, **keywords: Any) -> list[tuple[Any, ...]]:
        hosts = ("127.0.0.1", "127.0.0.3", "::1", "127.0.0.1") if host == "machine" else (host,)
        return [found for each in hosts for found in resolve(each, *args, **keywords)]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with listening("machine:0") as listener:
        assert hosts_of(listener) == ["127.0.0.1", "127.0.0.3", "::1"]


def test_an_address_that_the_machine_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `::1` in a container without IPv6; a name without any address is refused."""

    def resolved(host: str, *args: Any, **keywords: Any) -> list[tuple[Any, ...]]:
        hosts = {"machine": ("192.0.2.1", "127.0.0.1"), "nobody": ("192.0.2.1",)}
        return [
            found for each in hosts.get(host, (host,)) for found in resolve(each, *args, **keywords)
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with listening("machine:0") as listener:
        assert hosts_of(listener) == ["127.0.0.1"]
    with pytest.raises(InvalidArgument, match="cannot listen on nobody:0: Cannot assign"):
        Listener(parse_address("nobody:0"))


@pytest.mark.parametrize("taken", LOOPBACKS)
def test_a_port_in_use_on_one_of_the_addresses_is_refused(taken: str) -> None:
    """Some clients would else reach the other program. Nothing stays bound."""
    family = socket.AF_INET6 if ":" in taken else socket.AF_INET
    with socket.socket(family) as other:
        other.bind((taken, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidArgument, match="Address already in use"):
            Listener(parse_address(f"localhost:{port}"))
    with listening(f"localhost:{port}") as listener:
        assert len(listener.sockets) == 2


def test_a_free_port_is_free_on_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that another program has on the second address is given up for another one."""
    refusals = [errno.EADDRINUSE, errno.EADDRINUSE]
    bind = socket.socket.bind

    def refusing_bind(sock: socket.socket, where: Any) -> None:
        if sock.family == socket.AF_INET6 and refusals:
            raise OSError(refusals.pop(), "Address already in use")
        bind(sock, where)

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket,), {"bind": refusing_bind}))
    with listening("localhost:0") as listener:
        assert not refusals and set(hosts_of(listener)) == BOTH


def test_a_gateway_at_localhost_answers_on_both_addresses(daemon: RunningDaemon) -> None:
    with gateway(daemon, listen="localhost:0") as running:
        assert running.host == "localhost"
        for host in ("127.0.0.1", "[::1]", "localhost"):
            found = httpx.get(f"http://{host}:{running.port}/v1/models", timeout=CALL_S_MAX)
            assert found.status_code == 200

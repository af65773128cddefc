"""Checks of the gateway's health by programs, which need no key."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inferd import AsyncClient, Client
from inferd.gateways.http.callers import DaemonUser, new_key
from inferd.gateways.http.turns.pool import ConnectionPool, DaemonHealth
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd_process
from tests.echo import echo_model
from tests.gateways.http.driver import CALL_S_MAX, RunningGateway, gateway
from tests.gateways.http.test_waiting import LONG, Request, begun
from tests.waiting import wait_until

CONFIG = echo_model("echo") + echo_model("slow", step_ms=20)
PATHS = ("/health", "/v1/health", "/", "/api/version")


@pytest.fixture
def guarded(daemon: RunningDaemon, tmp_path: Path) -> Iterator[RunningGateway]:
    """A gateway that requests a key, and has one request at most."""
    file = tmp_path / "keys.toml"
    file.write_text(new_key("ada")[1])
    with gateway(daemon, "--keys", str(file), "--requests-max", "1") as running:
        yield running


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("path", PATHS)
def test_a_program_without_a_key_learns_that_the_daemon_answers(
    guarded: RunningGateway, path: str, method: str
) -> None:
    assert httpx.request(method, f"{guarded.url}{path}").status_code == 200
    assert httpx.get(f"{guarded.url}/v1/models").status_code == 401


def test_the_health_has_llama_servers_form(http: RunningGateway) -> None:
    assert httpx.get(f"{http.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{http.url}/").text == "Ollama is running"


def test_a_gateway_with_all_its_requests_is_healthy(daemon: RunningDaemon) -> None:
    with (
        gateway(daemon, "--requests-max", "1") as running,
        Request(running, {"model": "slow", **LONG}) as request,
    ):
        begun(request)
        assert httpx.get(f"{running.url}/v1/models").status_code == 503
        assert [httpx.get(f"{running.url}{path}").status_code for path in PATHS] == [200] * 4


def test_without_a_daemon_programs_get_503_and_browsers_the_page(tmp_path: Path) -> None:
    arguments = ("gateway", "--listen", "127.0.0.1:0")
    with inferd_process(*arguments, socket=str(tmp_path / "none")) as process:
        assert process.stderr is not None
        url = f"http://{process.stderr.readline().decode().split()[-1]}"
        found = {path: httpx.get(f"{url}{path}", timeout=CALL_S_MAX) for path in PATHS}
        page = httpx.get(f"{url}/", headers={"accept": "text/html"})
        process.kill()
    assert {path: each.status_code for path, each in found.items()} == dict.fromkeys(PATHS, 503)
    assert all(each.headers["retry-after"] == "1" for each in found.values())
    assert found["/health"].json()["error"]["code"] == "connection_lost"
    assert found["/api/version"].json()["error"].startswith("the daemon does not answer")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]


def test_the_health_follows_the_daemon(tmp_path: Path) -> None:
    """One that is stopped answers nothing, although its socket accepts connections."""
    with running_daemon(CONFIG) as daemon, gateway(daemon) as running:

        def status() -> int:
            return httpx.get(f"{running.url}/health", timeout=CALL_S_MAX).status_code

        assert status() == 200
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: status() == 503)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        wait_until(lambda: status() == 200)
        with Client(daemon.socket) as client:
            assert client.models()
        daemon.kill()
        wait_until(lambda: status() == 503)


@pytest.mark.asyncio
async def test_checks_within_a_second_share_a_connection(daemon: RunningDaemon) -> None:
    """Anyone can send them, so that each would otherwise cost the daemon a connection."""
    made: list[DaemonUser] = []

    def connect(user: DaemonUser) -> AsyncClient:
        made.append(user)
        return AsyncClient(daemon.socket)

    health = DaemonHealth(ConnectionPool(connect, 1))
    for _ in range(20):
        await health.check()
    assert len(made) < 20

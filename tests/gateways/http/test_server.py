"""The gateway's process: its end, and the commands of docs/gateway.md."""

from __future__ import annotations

import re
import signal
from http.client import IncompleteRead
from pathlib import Path

import openai
import pytest

from inferd import Client
from inferd.testing import RunningDaemon
from tests.daemon.command_line import inferd
from tests.echo import echo_model
from tests.gateways.http.driver import gateway
from tests.gateways.http.test_waiting import LONG, Request, begun, running
from tests.waiting import wait_until

CONFIG = echo_model("smollm2") + echo_model("slow", step_ms=20)
PAGE = (Path(__file__).resolve().parents[3] / "docs" / "gateway.md").read_text()


def test_requests_may_end_after_sigterm(daemon: RunningDaemon) -> None:
    body = {"model": "slow", "prompt": "x" * 60, "max_tokens": 60}
    with gateway(daemon) as other, Request(other, body) as request:
        lines = begun(request)
        other.process.send_signal(signal.SIGTERM)
        assert list(lines)[-1] == "data: [DONE]"
        assert other.process.wait(60) == 0


def test_a_killed_gateway_leaves_nothing(daemon: RunningDaemon, client: Client) -> None:
    with gateway(daemon) as other, Request(other, {"model": "slow", **LONG}) as request:
        lines = begun(request)
        assert running(client)
        other.process.kill()
        with pytest.raises((IncompleteRead, ConnectionError, ValueError)):
            raise ValueError(len(list(lines)))
    wait_until(lambda: not running(client))
    assert not client.sessions()


def test_a_unix_socket_is_removed_at_the_end(daemon: RunningDaemon, tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    with gateway(daemon, listen=f"unix:{path}") as other:
        other.process.send_signal(signal.SIGTERM)
        other.process.wait(60)
        assert not path.exists()


def test_the_keys_of_the_page_are_read(daemon: RunningDaemon, tmp_path: Path) -> None:
    made = inferd("gateway", "--new-key", "ada")
    key, sha256 = made.stderr.split()[-1], made.stdout.split('"')[1]
    [entry] = re.findall(r"```toml\n(\[keys.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "keys.toml"
    file.write_text(entry.replace("…", sha256))
    with (
        gateway(daemon, "--keys", str(file)) as other,
        openai.OpenAI(base_url=f"{other.url}/v1", api_key=key, max_retries=0) as api,
    ):
        assert [model.id for model in api.models.list()] == ["smollm2"]


def test_every_option_is_on_the_page() -> None:
    shown = set(re.findall(r"(--[a-z][a-z-]+)", inferd("gateway", "--help").stdout)) - {"--help"}
    table = PAGE[PAGE.index("## Options") :]
    assert set(re.findall(r"(--[a-z][a-z-]+)", table)) == shown

"""`supersede`: a newer request of the same user and key cancels the previous one."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from inferd import Cancelled, Client, Infill
from inferd.testing import RunningDaemon
from tests.echo import echo_model
from tests.gateways.http.driver import gateway

CONFIG = echo_model("code", fim=True, step_ms=5.0, slots=1)
LONG = "x" * 2000
"""Ten seconds of an answer, one step for each character."""


def test_the_older_request_ends_with_an_error_that_says_so(
    daemon: RunningDaemon, client: Client
) -> None:
    with client.session("code") as older:
        stream = older.stream(Infill(prefix=LONG, suffix=""), supersede="buffer 1")
        assert next(stream) == "x"
        with Client(daemon.socket) as another:
            assert another.infill("code", "a", "b", supersede="buffer 1") == "a|b"
        with pytest.raises(Cancelled, match="a newer request with the same key") as caught:
            "".join(stream)
        assert caught.value.data["by"] == "supersede"
        assert caught.value.data["metadata"]["output_tokens"] < len(LONG)


def test_requests_of_other_keys_and_labels_go_on(daemon: RunningDaemon, client: Client) -> None:
    with client.session("code") as older:
        stream = older.stream(Infill(prefix="y" * 100, suffix=""), supersede="buffer 1")
        first = next(stream)
        client.infill("code", "a", "b", supersede="buffer 2")
        with Client(daemon.socket, label="another") as other:
            other.infill("code", "a", "b", supersede="buffer 1")
        assert first + "".join(stream) == "y" * 100 + "|"


def test_a_request_that_waits_for_its_turn_is_superseded(
    daemon: RunningDaemon, client: Client
) -> None:
    with client.session("code") as holder:
        stream = holder.stream(Infill(prefix=LONG, suffix=""))
        next(stream)
        errors: list[Exception] = []
        queued = threading.Event()

        def wait_behind() -> None:
            with Client(daemon.socket) as waiting:
                try:
                    waiting.infill("code", "c", "d", supersede="k", on_queue=lambda _: queued.set())
                except Cancelled as exc:
                    errors.append(exc)

        thread = threading.Thread(target=wait_behind)
        thread.start()
        assert queued.wait(30)
        with Client(daemon.socket) as newer:
            found = newer.infill("code", "a", "b", supersede="k", priority="urgent")
        assert found == "a|b"
        thread.join(30)
        assert [error.data["by"] for error in errors] == ["supersede"]  # type: ignore[attr-defined]
        stream.close()


def test_over_http_the_older_request_gets_409_and_is_not_repeated(daemon: RunningDaemon) -> None:
    with gateway(daemon, "--hold-headers", "30") as http:
        fields = {"model": "code", "input_suffix": "", "supersede": "buffer"}
        found: list[httpx.Response] = []

        def ask_long() -> None:
            long = fields | {"input_prefix": LONG}
            found.append(httpx.post(f"{http.url}/infill", json=long, timeout=60))

        with httpx.stream(
            "POST",
            f"{http.url}/infill",
            json=fields | {"input_prefix": LONG, "stream": True},
            timeout=60,
        ) as streamed:
            lines = streamed.iter_lines()
            assert '"stop":false' in next(lines)
            thread = threading.Thread(target=ask_long)
            thread.start()
            events: list[dict[str, Any]] = [
                json.loads(line.removeprefix("data: ")) for line in lines if line
            ]
        assert "a newer request" in events[-1]["error"]["message"]
        short = httpx.post(f"{http.url}/infill", json=fields | {"input_prefix": "a"}, timeout=60)
        assert short.json()["content"] == "a|"
        thread.join(30)
        assert found[0].status_code == 409
        assert found[0].headers["x-should-retry"] == "false"
        assert "a newer request" in found[0].json()["error"]["message"]

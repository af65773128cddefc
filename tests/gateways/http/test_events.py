"""Models, queue and statistics over HTTP, as responses and as streams of events."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.gateways.http.callers import STREAMS_MAX, new_key
from inferd.testing import RunningDaemon, running_daemon
from tests.echo import echo_model
from tests.gateways.http.driver import gateway
from tests.gateways.http.events import Events, events
from tests.gateways.http.own_paths import PATH, Caller
from tests.waiting import wait_until

CONFIG = (
    echo_model("echo", load_ms=200)
    + echo_model("other")
    + echo_model("held", step_ms=20, slots=1)
    + echo_model("too-big", weight_bytes=10**15)
)


@pytest.fixture(scope="module")
def callers(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An operator, and a caller who may use only one model."""
    file: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    (operator, first), (user, second) = new_key("olga"), new_key("bob")
    file.write_text(f'{first}operator = true\n{second}models = ["held"]\n')
    with gateway(daemon, "--keys", str(file)) as running:
        yield Caller(running, operator), Caller(running, user)


def state_of(caller: Caller, model: str) -> Any:
    [found] = [m for m in caller.get("/models").json["data"] if m["id"] == model]
    return found


def test_an_operator_loads_swaps_and_unloads_models(callers: tuple[Caller, Caller]) -> None:
    operator, _ = callers
    assert state_of(operator, "other")["state"] == "unloaded"
    loaded = operator.post("/models/load", model="other")
    assert (loaded.status, loaded.json["state"], loaded.json["id"]) == (200, "loaded", "other")
    assert loaded.json["slots"] and loaded.json["ctx_size"] and loaded.json["resident_bytes"]
    swapped = operator.post("/models/swap", model="other", to="held")
    assert swapped.status == 200, swapped
    assert swapped.json["swapped_to"] == "held"
    # 503 as long as the old model is being unloaded.
    wait_until(lambda: operator.post("/models/swap", model="other", to="other").status == 200)
    assert state_of(operator, "other")["swapped_to"] is None
    assert operator.post("/models/unload", model="other", force=True).status == 200
    for stream in (False, True):
        unknown = operator.post("/models/load", model="missing", stream=stream)
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_a_load_streams_its_progress_and_its_end(callers: tuple[Caller, Caller]) -> None:
    operator, _ = callers
    for model, last in (("echo", "loaded"), ("too-big", "error")):
        body = {"model": model, "stream": True}
        with operator.opened("POST", f"{PATH}/models/load", body) as response:
            received = list(Events(response))
        kinds = [kind for kind, _ in received]
        assert kinds[0] == "progress" and kinds[-1] == last, received
        shares = [data["progress"] for kind, data in received if kind == "progress"]
        assert shares == sorted(shares)
    assert received[-1][1]["error"]["message"]


def test_events_begin_with_the_whole_state_and_follow_its_changes(
    callers: tuple[Caller, Caller], daemon: RunningDaemon
) -> None:
    _, user = callers
    with events(user) as stream, Client(daemon.socket, on_behalf_of="@bob") as client:
        assert stream.next_of("daemon") == {"available": True}
        assert [m["id"] for m in stream.next_of("models")["data"]] == ["held"]
        assert stream.next_of("queue")["data"] == []
        with client.session("held", session_id="mine") as session:
            turn = session.stream("x" * 400)
            next(turn)
            [shown] = stream.next_of("queue")["data"]
            assert (shown["session_id"], shown["state"]) == ("mine", "running")
            rates = [None]
            while not any(rates):
                [statistics] = stream.next_of("statistics")["data"]
                rates = [statistics["generated_per_second"], statistics["computed_per_second"]]
            assert statistics["model"] == "held" and statistics["running"] == 1
            turn.close()
        while stream.next_of("queue")["data"]:
            pass


def test_a_stream_has_only_the_kinds_that_it_names(callers: tuple[Caller, Caller]) -> None:
    operator, _ = callers
    with events(operator, "?include=queue") as stream:
        assert [kind for kind, _ in islice(stream, 2)] == ["daemon", "queue"]
    refused = operator.get("/events?include=everything")
    assert (refused.status, refused.json["error"]["param"]) == (400, "include")


def test_a_caller_has_a_bounded_number_of_streams(callers: tuple[Caller, Caller]) -> None:
    operator, user = callers
    with ExitStack() as stack:
        for _ in range(STREAMS_MAX):
            stack.enter_context(events(user))
        refused = user.get("/events")
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        with events(operator) as stream:
            assert stream.next_of("daemon")["available"]


def test_a_stream_outlives_its_daemon_and_ends_with_the_gateway() -> None:
    with running_daemon(CONFIG) as daemon, gateway(daemon) as running:
        with events(Caller(running)) as stream:
            assert stream.next_of("daemon") == {"available": True}
            daemon.kill()
            away = stream.next_of("daemon")
            assert not away["available"] and away["error"]["message"]
            daemon.start_again()
            assert stream.next_of("daemon") == {"available": True}
            begin_s = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            assert list(stream) is not None
        assert running.process.wait(60) == 0
        assert time.monotonic() - begin_s < 5

"""Scrapes of the entry of a real fleet over HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from inferd import Client
from inferd.gateways.fleet.entry.metrics import FAMILIES, PREFIX
from tests.daemon.metrics.scraping import ScrapedMetrics, ask, scrape
from tests.daemon.metrics.test_prometheus import run
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.waiting import wait_until

CONFIG = echo_model("echo", slots=4)
HISTOGRAM = "inferd_time_to_first_token_seconds"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    """A fleet for all tests; each of them uses all nodes at its end, without sessions."""
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b") as running:
        running.until_noted("the metrics of the fleet are at")
        yield running


def scraped(fleet: RunningFleet) -> ScrapedMetrics:
    return ScrapedMetrics(scrape(fleet.metrics))


def until(fleet: RunningFleet, holds: Callable[[ScrapedMetrics], bool]) -> ScrapedMetrics:
    """Return the first scrape for which *holds* returns True."""
    return wait_until(lambda: found if holds(found := scraped(fleet)) else None)


def health(fleet: RunningFleet) -> tuple[int, object]:
    status, _, body = ask(fleet.metrics, b"GET /health HTTP/1.1\r\n\r\n")
    return status, json.loads(body)


def lose(fleet: RunningFleet, name: str) -> None:
    fleet.kill_relay(name)
    fleet.until_noted(f"node {name} is lost")


def find_again(fleet: RunningFleet, name: str) -> None:
    fleet.start_relay(name)
    fleet.until_noted(f"node {name} serves")


def test_the_process_is_the_entrys(fleet: RunningFleet) -> None:
    (sample,) = scraped(fleet).families["process_resident_memory_bytes"].samples
    assert sample.labels == {} and sample.value > 0


def test_the_entry_counts_contexts_connections_and_nodes(fleet: RunningFleet) -> None:
    before = scraped(fleet)
    with Client(fleet.socket) as client, client.session("echo", raw=True) as session:
        session.chat("hello")
        (node,) = (s["node"] for s in client.sessions() if s["context"] == session.context)
        during = scraped(fleet)
    opened = "fleet_contexts_opened_total"
    assert during(opened, node=node) == before(opened, node=node) + 1
    assert during("fleet_contexts", node=node) == 1
    assert during("fleet_connections") == before("fleet_connections") + 1
    assert during("fleet_connections_max") == 256
    assert (during("fleet_nodes", state="ready"), during("fleet_nodes", state="lost")) == (2, 0)
    assert 0 <= during("fleet_node_report_age_seconds", node=node) < 60
    ours = {name.removeprefix(PREFIX) for name in during.families if name.startswith(PREFIX)}
    assert ours == set(FAMILIES)
    for name, family in FAMILIES.items():
        assert during.families[PREFIX + name].type == family.kind
        for sample in during.families[PREFIX + name].samples:
            assert set(sample.labels) == set(family.labels)
    until(fleet, lambda f: f("fleet_contexts", node=node) == f("fleet_connections") == 0)


def test_promtool_finds_nothing_in_a_scrape(fleet: RunningFleet) -> None:
    assert run("promtool", "check", "metrics", text=scrape(fleet.metrics)) == ""


def test_the_call_returns_the_same_families(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        called = ScrapedMetrics(client.metrics())
    assert set(called.families) == set(scraped(fleet).families)
    assert called("fleet_node_up", node="b") == 1


def test_a_lost_node_is_counted_with_its_contexts(fleet: RunningFleet) -> None:
    assert health(fleet) == (200, {"status": "ok", "failing": []})
    with Client(fleet.socket) as client, client.session("echo", raw=True) as session:
        session.chat("hello")
        (node,) = (s["node"] for s in client.sessions() if s["context"] == session.context)
        before = scraped(fleet)
        lose(fleet, node)
        found = scraped(fleet)
    for counter in ("fleet_node_losses_total", "fleet_contexts_lost_total"):
        assert found(counter, node=node) == before(counter, node=node) + 1
    assert (found("fleet_node_up", node=node), found("fleet_nodes", state="lost")) == (0, 1)
    assert health(fleet) == (200, {"status": "degraded", "failing": [node]})
    other = "ab".replace(node, "")
    assert found("fleet_node_up", node=other) == 1
    lose(fleet, other)
    assert health(fleet)[0] == 503
    assert scraped(fleet)("fleet_nodes", state="lost") == 2
    for name in fleet.daemons:
        find_again(fleet, name)
    again = until(fleet, lambda f: f("fleet_node_up", node=node) == 1)
    assert again("fleet_node_losses_total", node=node) == found(
        "fleet_node_losses_total", node=node
    )


def test_moves_are_counted_for_the_node_that_is_left(fleet: RunningFleet) -> None:
    with Client(fleet.socket) as client:
        with client.session("echo", session_id="moves", raw=True) as session:
            session.chat("hello")
        (node,) = (s["node"] for s in client.sessions(dormant=True) if s["session_id"] == "moves")
        assert client.drain(node=node).moved == 1
        found = scraped(fleet)
        client.drain(node=node, undo=True)
        client.delete_session(session_id="moves")
    assert found("fleet_sessions_moved_total", node=node) == 1
    assert found("fleet_nodes", state="draining") == 1
    assert (found("fleet_sessions_moving"), found("fleet_sessions_interrupted")) == (0, 0)


def test_a_taken_port_is_reported_and_tried_again(fleet: RunningFleet) -> None:
    fleet.kill_entry()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fleet.start_entry(f"metrics = {port}\n")
        assert str(port) in fleet.until_noted("the metrics are not served")
        with Client(fleet.socket) as client:
            assert client.models()
    assert f"127.0.0.1:{port}" in fleet.until_noted("the metrics of the fleet are at")
    assert ScrapedMetrics(scrape(f"127.0.0.1:{port}"))("fleet_node_up", node="a") == 1

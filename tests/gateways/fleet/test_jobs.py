"""Jobs over a fleet: each is on one node, which the entry finds again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from inferd import Client
from inferd.backends.errors import Busy, InvalidArgument, NotFound
from tests.echo import echo_model
from tests.gateways.fleet.members import RunningFleet, running_fleet
from tests.gateways.http.driver import gateway
from tests.waiting import wait_until

CONFIG = {"a": echo_model("e") + echo_model("only-a"), "b": echo_model("e") + echo_model("only-b")}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), CONFIG, "a", "b") as running:
        yield running


@pytest.fixture
def client(fleet: RunningFleet) -> Iterator[Client]:
    with Client(fleet.socket) as connected:
        yield connected


def lines(model: str, count: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"{number}",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": f"hello {number}", "max_tokens": 8},
        }
        for number in range(count)
    ]


def submit(client: Client, model: str, count: int = 3) -> dict[str, Any]:
    return dict(client.jobs.submit(lines(model, count)))


def test_a_job_is_computed_on_the_node_that_has_its_model(client: Client) -> None:
    for node in ("a", "b"):
        job = submit(client, f"only-{node}")
        assert job["node"] == node
        assert client.jobs.wait(job["id"])["state"] == "completed"
        results = sorted(client.jobs.results(job["id"]), key=lambda one: one["custom_id"])
        assert [one["custom_id"] for one in results] == ["0", "1", "2"]
        assert all(one["response"]["status_code"] == 200 for one in results)
        assert client.jobs.delete(job["id"]) and not client.jobs.delete(job["id"])
        with pytest.raises(NotFound):
            client.jobs.get(job["id"])


def test_jobs_and_files_of_all_nodes_are_one_list(client: Client, fleet: RunningFleet) -> None:
    jobs = [submit(client, f"only-{node}", 1) for node in ("a", "b", "a")]
    for job in jobs:
        client.jobs.wait(job["id"])
    assert [job["id"] for job in client.jobs.list()] == [job["id"] for job in jobs][::-1]
    files = client.jobs.files()
    assert {file["job"] for file in files} >= {job["id"] for job in jobs}
    inputs = [file for file in files if file["purpose"] == "input"]
    assert client.jobs.file(inputs[0]["id"])["bytes"] == inputs[0]["bytes"]
    for job in jobs:
        with Client(fleet.daemons[job["node"]].socket) as direct:
            assert direct.jobs.get(job["id"])["completed"] == 1
        client.jobs.delete(job["id"])


def test_another_entry_finds_a_job_again(client: Client, fleet: RunningFleet) -> None:
    job = submit(client, "only-b")
    client.close()
    fleet.kill_entry()
    fleet.start_entry()
    with Client(fleet.socket) as again:
        assert again.jobs.wait(job["id"])["completed"] == 3
        assert len(list(again.jobs.results(job["id"]))) == 3
        again.jobs.delete(job["id"])


def test_a_job_is_cancelled_on_its_node(client: Client) -> None:
    job = submit(client, "only-a", 500)
    assert client.jobs.cancel(job["id"])["state"] == "cancelled"
    client.jobs.delete(job["id"])


def test_a_file_that_is_not_one_of_requests_is_refused_by_its_node(client: Client) -> None:
    with pytest.raises(InvalidArgument):
        client.jobs.submit([{"custom_id": "1", "url": "/v1/nothing", "body": {}}])
    for name in ("batch_none", ""):
        with pytest.raises(NotFound):
            client.jobs.cancel(name)
        with pytest.raises(NotFound):
            client.jobs.submit_file(name)


def test_a_job_of_a_lost_node_is_not_said_to_be_missing(tmp_path: Any) -> None:
    with running_fleet(tmp_path, CONFIG, "a", "b") as fleet, Client(fleet.socket) as client:
        job = submit(client, "only-b")
        os.kill(fleet.daemons["b"].pid, signal.SIGKILL)
        fleet.until_noted("node b is lost")
        with pytest.raises(Busy) as caught:
            client.jobs.get(job["id"])
        assert caught.value.data["cause"] == "node"
        with pytest.raises(Busy):
            client.jobs.get("batch_of_nobody")
        assert client.jobs.list() == []
        own = submit(client, "e", 1)
        assert own["node"] == "a" and client.jobs.wait(own["id"])["state"] == "completed"


def test_the_gateway_of_a_fleet_serves_batches_and_responses_in_the_background(
    fleet: RunningFleet,
) -> None:
    body = b"\n".join(msgspec.json.encode(line) for line in lines("only-b"))
    with gateway(fleet) as running, httpx.Client(base_url=running.url, timeout=60.0) as api:

        def sent(path: str, **more: Any) -> dict[str, Any]:
            return dict(api.post(path, **more).raise_for_status().json())

        def ended(path: str) -> dict[str, Any] | None:
            found = api.get(path).raise_for_status().json()
            return found if found["status"] in ("completed", "failed") else None

        file = sent("/v1/files", files={"file": ("r.jsonl", body)}, data={"purpose": "batch"})
        fields = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
        batch = sent("/v1/batches", json={**fields, "completion_window": "24h"})
        batch = wait_until(lambda: ended(f"/v1/batches/{batch['id']}"))
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        results = api.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        assert len(results.splitlines()) == 3
        asked = {"model": "only-a", "input": "hello", "background": True}
        response = sent("/v1/responses", json=asked)
        response = wait_until(lambda: ended(f"/v1/responses/{response['id']}"))
        assert response["status"] == "completed" and response["output"]

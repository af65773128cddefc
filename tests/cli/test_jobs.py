"""`inferd jobs`: from a file to its results, and the exit statuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd
from tests.echo import echo_model


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(echo_model("e")) as running:
        yield running


def requests(path: Path, *models: str) -> Path:
    lines = [
        {"custom_id": f"r{n}", "body": {"model": model, "prompt": f"text {n}"}}
        for n, model in enumerate(models)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_file_is_submitted_waited_for_read_and_deleted(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    socket = ("--socket", daemon.socket)
    file = requests(tmp_path / "requests.jsonl", "e", "e", "e")
    endpoint = ("--endpoint", "/v1/completions")
    submitted = inferd(*socket, "jobs", "submit", str(file), *endpoint)
    assert submitted.exit_code == 0, submitted.stderr
    job = submitted.stdout.strip()
    waited = inferd(*socket, "jobs", "wait", job)
    assert waited.exit_code == 0
    assert waited.stdout.startswith("completed: 3 of 3 requests were answered")
    listed = inferd(*socket, "jobs")
    assert job in listed.stdout and "3/3" in listed.stdout
    [shown] = document(inferd(*socket, "jobs", "--json"))["jobs"]
    assert (shown["id"], shown["state"]) == (job, "completed")
    results = inferd(*socket, "jobs", "results", job).stdout.splitlines()
    texts = {
        r["custom_id"]: r["response"]["body"]["choices"][0]["text"]
        for r in map(json.loads, results)
    }
    assert texts == {"r0": "text 0", "r1": "text 1", "r2": "text 2"}
    assert len(document(inferd(*socket, "jobs", "results", job, "--json"))["results"]) == 3
    assert inferd(*socket, "jobs", "cancel", job).exit_code == 0  # it has ended: nothing changes
    assert inferd(*socket, "jobs", "rm", job).stdout == "deleted\n"
    assert inferd(*socket, "jobs", "rm", job).stdout == f"there was no job {job!r}\n"
    assert job not in inferd(*socket, "jobs").stdout


def test_failed_requests_and_bad_files_have_an_exit_status(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    socket = ("--socket", daemon.socket)
    endpoint = ("--endpoint", "/v1/completions")
    file = requests(tmp_path / "requests.jsonl", "e", "missing")
    ended = inferd(*socket, "jobs", "submit", str(file), "--wait", *endpoint)
    assert ended.exit_code == 1
    assert "completed: 1 of 2 requests were answered, 1 failed" in ended.stdout
    file.write_text("no json\n")
    refused = inferd(*socket, "jobs", "submit", str(file))
    assert refused.exit_code == 1
    assert "line 1 of the file is not a request in JSON" in refused.stderr
    missing = inferd(*socket, "jobs", "submit", str(tmp_path / "none"))
    assert missing.exit_code == 1 and "cannot be read" in missing.stderr
    unknown = inferd(*socket, "jobs", "wait", "batch_none")
    assert unknown.exit_code == 1 and "there is no job 'batch_none'" in unknown.stderr

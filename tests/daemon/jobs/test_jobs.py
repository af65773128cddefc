"""Jobs of a daemon in a process: results, rights, bounds, kills, a full disk, other users."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from inferd import AsyncClient, Client, JobInfo
from inferd.backends.errors import (
    BackendError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    ShuttingDown,
    Timeout,
    TooLarge,
)
from inferd.daemon.jobs.jobs import JOB_STATES, REQUEST_OUTCOMES, UPLOADS_USER_MAX
from inferd.daemon.jobs.runner import JOB_REQUESTS_MAX, LOSSES_MAX
from inferd.gateways.http.job_process import NICENESS
from inferd.ipc import messages as w
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.metrics.scraping import scrape_metrics
from tests.daemon.other_users import ADA, BOB, as_user, daemon_for_all
from tests.echo import echo_model
from tests.waiting import wait_until

LINES_MAX = 1000
LONG = "the model repeats this text, which takes a minute " * 60
HEAD = "[daemon]\n"
CONFIG = (
    f"jobs-lines-max = {LINES_MAX}\n"
    + echo_model("e", slots=4)
    + echo_model("slow", slots=1, step_ms=10)
    + echo_model("stuck", slots=1, step_ms=20)
)


def chat(name: str, model: str = "e", text: str = "") -> dict[str, Any]:
    text = text or (LONG if model == "stuck" else f"hello {name}")
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages}
    return {"custom_id": name, "url": "/v1/chat/completions", "body": body}


def chats(count: int, model: str = "e") -> list[dict[str, Any]]:
    return [chat(f"r{number}", model) for number in range(count)]


def text_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with daemon_for_all(CONFIG) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as opened:
        yield opened
        for job in opened.jobs.list():
            opened.jobs.delete(job["id"])
        for file in opened.jobs.files():
            opened.jobs.delete_file(file["id"])


def files_in(daemon: RunningDaemon) -> set[str]:
    return {path.name for path in (daemon.directory / "state" / "jobs").glob("*.jsonl")}


def test_each_request_has_one_result_by_its_name(client: Client, tmp_path: Path) -> None:
    seen: list[JobInfo] = []
    job = client.jobs.submit(chats(20), metadata={"night": "1"})
    assert (job["requests"], job["priority"]) == (20, "low")
    ended = client.jobs.wait(job["id"], on_progress=seen.append)
    assert (ended["state"], ended["completed"], ended["failed"]) == ("completed", 20, 0)
    assert ended["metadata"] == {"night": "1"}
    assert seen[-1] == ended
    results = {r["custom_id"]: text_of(r) for r in client.jobs.results(job["id"])}
    assert results == {f"r{number}": f"hello r{number}" for number in range(20)}
    assert client.jobs.list() == [ended]


def test_requests_of_all_paths_come_from_a_file_and_failures_are_apart(
    client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"custom_id": "c", "url": "/v1/completions", "body": {"model": "e", "prompt": "text"}}\n'
        "\n"
        '{"custom_id": "e", "url": "/v1/embeddings", "body": {"model": "e", "input": "text"}}\n'
        '{"custom_id": "r", "url": "/v1/responses", "body": {"model": "e", "input": "text"}}\n'
        '{"custom_id": "m", "url": "/v1/responses", "body": {"model": "no", "input": "text"}}\n'
        '{"custom_id": "f", "url": "/v1/completions", "body": {"model": 3}}'
    )
    job = client.jobs.submit(path)
    assert client.jobs.file(job["input_file"])["name"] == "requests.jsonl"
    ended = client.jobs.wait(job["id"])
    assert (ended["state"], ended["completed"], ended["failed"]) == ("completed", 3, 2)
    results = {r["custom_id"]: r["response"] for r in client.jobs.results(job["id"])}
    assert {name: r["status_code"] for name, r in results.items()} == {
        **dict.fromkeys("cer", 200),
        "m": 404,
        "f": 400,
    }
    assert results["c"]["body"]["choices"][0]["text"] == "text"
    assert results["r"]["body"]["output"][0]["content"][0]["text"] == "text"
    assert len(results["e"]["body"]["data"][0]["embedding"]) > 0
    assert client.jobs.file(ended["error_file"])["lines"] == 2


def test_a_job_that_is_deleted_leaves_nothing(client: Client, daemon: RunningDaemon) -> None:
    before = files_in(daemon)
    job = client.jobs.submit(chats(2))
    client.jobs.wait(job["id"])
    assert len(files_in(daemon)) > len(before)
    assert client.jobs.delete(job["id"])
    assert not client.jobs.delete(job["id"])
    assert files_in(daemon) == before
    with pytest.raises(NotFound):
        client.jobs.get(job["id"])
    with pytest.raises(NotFound):
        client.jobs.file(job["input_file"])


def test_a_cancelled_job_ends_at_once_and_keeps_its_results(client: Client) -> None:
    job = client.jobs.submit([chat("done"), chat("stuck", "stuck")])
    wait_until(lambda: client.jobs.get(job["id"])["completed"] == 1)
    ended = client.jobs.cancel(job["id"])
    assert (ended["state"], ended["completed"]) == ("cancelled", 1)
    assert client.jobs.wait(job["id"]) == client.jobs.get(job["id"])
    assert [r["custom_id"] for r in client.jobs.results(job["id"])] == ["done"]
    wait_until(lambda: not client.queue())  # its turn has ended, too


def test_a_job_that_expires_gives_up_the_rest(client: Client) -> None:
    job = client.jobs.submit(chats(3, "stuck"), expires=0.2)
    ended = client.jobs.wait(job["id"])
    assert (ended["state"], ended["completed"]) == ("expired", 0)


def test_requests_wait_in_the_class_of_their_job(client: Client) -> None:
    blocker = client.jobs.submit([chat("first", "stuck")])
    wait_until(lambda: client.queue())
    job = client.jobs.submit([chat("urgent", "stuck")], priority="urgent")
    found = wait_until(lambda: client.queue() if len(client.queue()) == 2 else None)
    assert {entry["priority"] for entry in found} == {"low", "urgent"}
    for each in (blocker, job):
        client.jobs.delete(each["id"])


def test_a_wait_ends_in_time_and_a_client_that_leaves_changes_nothing(
    client: Client, daemon: RunningDaemon
) -> None:
    job = client.jobs.submit([chat("stuck", "stuck")])
    with pytest.raises(Timeout, match="has not ended within"):
        client.jobs.wait(job["id"], timeout=0.05)
    leaving = Client(daemon.socket).open()
    waiting = threading.Thread(target=_wait_quietly, args=(leaving, job["id"]))
    waiting.start()
    leaving.close()
    waiting.join()
    assert client.jobs.get(job["id"])["state"] in ("waiting", "running")


def _wait_quietly(client: Client, job_id: str) -> None:
    with pytest.raises(Exception, match=r"."):
        client.jobs.wait(job_id)


@pytest.mark.asyncio
async def test_the_asynchronous_client_has_the_same_calls(daemon: RunningDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        job = await client.jobs.submit(chats(3))
        await client.jobs.wait(job["id"])
        names = [result["custom_id"] async for result in client.jobs.results(job["id"])]
        assert sorted(names) == ["r0", "r1", "r2"]
        assert await client.jobs.delete(job["id"])


# Files.


def test_a_file_with_a_line_that_is_not_json_is_refused_and_deleted(
    client: Client, daemon: RunningDaemon, tmp_path: Path
) -> None:
    before = files_in(daemon)
    path = tmp_path / "requests.jsonl"
    path.write_text('{"url": "/v1/completions", "body": {"model": "e"}}\nnot json\n')
    with pytest.raises(InvalidArgument, match="line 2 of the file is not a request") as refused:
        client.jobs.submit(path)
    assert refused.value.data == {"line": 2}
    assert files_in(daemon) == before


def test_a_million_lines_are_refused_in_bounded_memory(
    client: Client, daemon: RunningDaemon
) -> None:
    before, memory = files_in(daemon), psutil.Process(daemon.pid).memory_info().rss
    with pytest.raises(TooLarge, match=f"more than {LINES_MAX} lines"):
        client.jobs.submit(chat(str(number)) for number in range(1_000_000))
    assert psutil.Process(daemon.pid).memory_info().rss - memory < 20 << 20
    assert files_in(daemon) == before


def test_a_file_at_the_bound_of_lines_is_taken(client: Client) -> None:
    assert client.jobs.upload(chats(LINES_MAX))["lines"] == LINES_MAX
    with pytest.raises(TooLarge):
        client.jobs.upload(chats(LINES_MAX + 1))


def test_a_line_without_end_is_refused(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"x" * (17 << 20))
    with pytest.raises(TooLarge, match="line 1 of the file has more than"):
        client.jobs.submit(path)


def test_an_upload_ends_with_its_connection(client: Client, daemon: RunningDaemon) -> None:
    before = files_in(daemon)
    with Client(daemon.socket) as other:
        part = w.UploadFileParams(data=b"{}\n")
        given_up = other.jobs.upload_part(part)
        assert client.jobs.delete_file(given_up["id"])
        assert files_in(daemon) == before
        other.jobs.upload_part(part)
        assert len(files_in(daemon)) == len(before) + 1
    wait_until(lambda: files_in(daemon) == before)


def test_a_file_that_a_job_needs_is_not_deleted(client: Client) -> None:
    job = client.jobs.submit([chat("stuck", "stuck")])
    with pytest.raises(InvalidArgument, match="has not ended needs the file"):
        client.jobs.delete_file(job["input_file"])
    with pytest.raises(InvalidArgument, match="belongs to the job"):
        client.jobs.delete_file(job["output_file"])
    assert not client.jobs.delete_file("file-none")


def test_parts_of_files_are_where_they_should_be(client: Client, daemon: RunningDaemon) -> None:
    with pytest.raises(InvalidArgument, match="begins at 0"):
        client.jobs.upload_part(w.UploadFileParams(data=b"{}", offset=1 << 40))
    part = w.UploadFileParams(data=b"{}")
    part.file = client.jobs.upload_part(part)["id"]
    part.offset = 1 << 40
    with pytest.raises(InvalidArgument, match="but the file has 2 bytes"):
        client.jobs.upload_part(part)
    part.offset, part.end = 2, True
    assert client.jobs.upload_part(part)["bytes"] == 4
    for offset in (4, 1 << 63, (1 << 64) - 1):
        assert client.jobs.read_file(part.file, offset).data == b""


def test_uploads_of_a_user_are_bounded(daemon: RunningDaemon, client: Client) -> None:
    with Client(daemon.socket) as other:
        for _ in range(UPLOADS_USER_MAX):
            other.jobs.upload_part(w.UploadFileParams(data=b"x"))
        with pytest.raises(QuotaExceeded, match="uploads of the user have not ended"):
            client.jobs.upload([])
    wait_until(lambda: not files_in(daemon))
    client.jobs.delete_file(client.jobs.upload([])["id"])


def test_results_are_read_while_they_arise(client: Client) -> None:
    job = client.jobs.submit(chats(4, "slow"))
    offset, data = 0, b""
    while (part := client.jobs.read_file(job["output_file"], offset, wait=30)).data:
        offset, data = offset + len(part.data), data + part.data
    assert not part.growing
    assert data.count(b"\n") == 4


# Users.


def test_other_users_see_neither_jobs_nor_files(client: Client, daemon: RunningDaemon) -> None:
    with as_user(ADA):
        ada = Client(daemon.socket).open()
    with as_user(BOB):
        bob = Client(daemon.socket).open()
    with ada, bob:
        job = ada.jobs.submit(chats(2))
        assert ada.jobs.wait(job["id"])["completed"] == 2
        assert (bob.jobs.list(), bob.jobs.files()) == ([], [])
        for file in (job["input_file"], job["output_file"]):
            with pytest.raises(NotFound):
                bob.jobs.read_file(file)
            assert not bob.jobs.delete_file(file)
        with pytest.raises(NotFound):
            bob.jobs.get(job["id"])
        with pytest.raises(NotFound):
            bob.jobs.cancel(job["id"])
        assert not bob.jobs.delete(job["id"])
        with pytest.raises(PermissionDenied):
            bob.jobs.list(all_users=True)
        with pytest.raises(NotFound):
            bob.jobs.submit_file(job["input_file"])
        [listed] = client.jobs.list(all_users=True)  # an operator
        assert (listed["id"], listed["uid"], listed["metadata"]) == (job["id"], ADA, {})
        with pytest.raises(NotFound):
            client.jobs.read_file(job["output_file"])
        assert client.jobs.delete(job["id"])


def test_labels_divide_jobs(daemon: RunningDaemon, client: Client) -> None:
    with Client(daemon.socket, label="one") as one, Client(daemon.socket, label="two") as two:
        job = one.jobs.submit(chats(1))
        one.jobs.wait(job["id"])
        assert two.jobs.list() == []
        with pytest.raises(NotFound):
            two.jobs.get(job["id"])
        assert [found["id"] for found in client.jobs.list()] == [job["id"]]


def test_the_jobs_of_two_users_take_turns(daemon: RunningDaemon) -> None:
    with as_user(ADA):
        ada = Client(daemon.socket).open()
    with as_user(BOB):
        bob = Client(daemon.socket).open()
    with ada, bob:
        first = ada.jobs.submit(chats(40, "slow"))
        wait_until(lambda: ada.jobs.get(first["id"])["completed"])
        second = bob.jobs.submit(chats(5, "slow"))
        bob.jobs.wait(second["id"])
        assert ada.jobs.get(first["id"])["state"] == "running"
        ada.jobs.delete(first["id"])
        bob.jobs.delete(second["id"])


def test_requests_of_a_user_without_the_right_fail() -> None:
    config = f"[access.ada]\nusers = [{ADA}]\nallow = ['use']\npriority-max = 'low'\n"
    with daemon_for_all(CONFIG + config) as daemon, Client(daemon.socket) as root:
        with as_user(ADA):
            ada = Client(daemon.socket).open()
        with ada:
            with pytest.raises(PermissionDenied):
                ada.jobs.submit(chats(1), priority="normal")
            job = ada.jobs.submit([chat("stuck", "stuck"), *chats(2, "stuck")])
            wait_until(lambda: root.queue(all_users=True))
        path = daemon.directory / "config.toml"
        path.write_text(path.read_text().replace("allow = ['use']", "allow = []"))
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: "config.read_again" in daemon.log)
        daemon.kill()  # a drain would wait for the running turn
        daemon.start_again()
        with Client(daemon.socket) as root:
            wait_until(lambda: root.jobs.list(all_users=True)[0]["failed"] == 3)
            assert root.jobs.list(all_users=True)[0]["id"] == job["id"]


# Kills, restarts, a full disk.


def lines_of(daemon: RunningDaemon, job: JobInfo) -> list[bytes]:
    path = daemon.directory / "state" / "jobs" / f"{job['output_file']}.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def test_a_kill_of_the_daemon_loses_and_repeats_nothing() -> None:
    with running_daemon(HEAD + CONFIG) as daemon:
        with Client(daemon.socket) as client:
            job = client.jobs.submit(chats(30, "slow"))
            wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 5)
            daemon.kill()
        stored = lines_of(daemon, job)
        for _ in range(2):
            daemon.start_again()
            daemon.kill()
        assert lines_of(daemon, job)[: len(stored)] == stored
        daemon.start_again()
        with Client(daemon.socket) as client:
            ended = client.jobs.wait(job["id"])
            assert (ended["state"], ended["completed"]) == ("completed", 30)
            names = Counter(r["custom_id"] for r in client.jobs.results(job["id"]))
            assert names == Counter(f"r{number}" for number in range(30))
            assert lines_of(daemon, job)[: len(stored)] == stored
        daemon.stop()
        daemon.start_again()
        with Client(daemon.socket) as client:
            assert client.jobs.get(job["id"])["ended_at"] == ended["ended_at"]


def test_a_stopped_daemon_continues_its_jobs_and_a_client_waits_on() -> None:
    with running_daemon(HEAD + CONFIG) as daemon, Client(daemon.socket, reconnect=True) as client:
        job = client.jobs.submit(chats(30, "slow"))
        wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 2)
        ended: list[JobInfo] = []
        waiting = threading.Thread(target=lambda: ended.append(client.jobs.wait(job["id"])))
        waiting.start()
        assert daemon.stop() == 0
        assert len(lines_of(daemon, job)) < 30
        daemon.start_again()
        waiting.join()
        assert ended[0]["completed"] == 30
        assert len(lines_of(daemon, job)) == 30


def test_a_kill_during_an_upload_leaves_no_file() -> None:
    with running_daemon(HEAD + CONFIG) as daemon:
        with Client(daemon.socket) as client:
            client.jobs.upload_part(w.UploadFileParams(data=b"{}\n"))
            daemon.kill()
        assert len(files_in(daemon)) == 1
        daemon.start_again()
        assert files_in(daemon) == set()


def process_of_jobs(daemon: RunningDaemon, killed: Container[int] = ()) -> psutil.Process | None:
    """Return the process of jobs, if there is one that was not *killed*."""
    for process in psutil.Process(daemon.pid).children():
        with suppress(psutil.NoSuchProcess):
            if process.nice() == NICENESS and process.pid not in killed:
                return process
    return None


def turn_not_among(client: Client, contexts: Container[int]) -> int | None:
    """Return the context of a turn that is not among those of earlier ones."""
    found = (entry["context"] for entry in client.queue())
    return next((context for context in found if context not in contexts), None)


def test_requests_are_sent_again_when_their_process_is_killed(
    client: Client, daemon: RunningDaemon
) -> None:
    job = client.jobs.submit(chats(20, "slow"))
    wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 2)
    process = process_of_jobs(daemon)
    assert process is not None
    process.kill()
    ended = client.jobs.wait(job["id"])
    assert (ended["completed"], ended["failed"]) == (20, 0)
    assert len(lines_of(daemon, ended)) == 20


def test_a_request_that_ends_three_processes_fails_and_the_others_do_not() -> None:
    with running_daemon(HEAD + CONFIG) as daemon, Client(daemon.socket) as client:
        job = client.jobs.submit([chat("stuck", "stuck")])
        killed, contexts = set[int](), set[int]()
        for _ in range(LOSSES_MAX):
            turn = wait_until(lambda: turn_not_among(client, contexts))
            process = wait_until(lambda: process_of_jobs(daemon, killed))
            process.kill()
            contexts.add(turn)
            killed.add(process.pid)
        ended = client.jobs.wait(job["id"])
        assert (ended["state"], ended["completed"], ended["failed"]) == ("completed", 0, 1)
        [result] = client.jobs.results(job["id"])
        assert (result["custom_id"], result["response"]["status_code"]) == ("stuck", 500)
        assert "3 processes ended" in result["response"]["body"]["error"]["message"]
        other = client.jobs.submit(chats(2))
        assert client.jobs.wait(other["id"])["completed"] == 2


def test_a_full_disk_delays_results_and_refuses_uploads() -> None:
    with running_daemon(HEAD + CONFIG) as daemon, Client(daemon.socket) as client:
        job = client.jobs.submit(chats(20, "slow"))
        done = wait_until(lambda: client.jobs.get(job["id"])["completed"])
        psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_FSIZE, (600, -1))
        wait_until(lambda: _failing(client))
        with pytest.raises(BackendError, match="files of jobs cannot be written"):
            client.jobs.submit(chats(20))
        stored = client.jobs.get(job["id"])
        assert done <= stored["completed"] < 20
        assert all(line.endswith(b"}") for line in lines_of(daemon, job))
        psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_FSIZE, (-1, -1))
        assert client.jobs.wait(job["id"])["completed"] == 20
        names = Counter(r["custom_id"] for r in client.jobs.results(job["id"]))
        assert names == Counter(f"r{number}" for number in range(20))
        wait_until(lambda: not _failing(client))


def _failing(client: Client) -> bool:
    return any(c["component"] == "jobs" and not c["up"] for c in client.stats()["components"])


# Bounds.


def test_older_results_of_the_same_user_make_space_for_newer_ones() -> None:
    config = HEAD + "jobs-user-max = 4\n" + CONFIG
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        ids = []
        for _ in range(4):
            job = client.jobs.submit(chats(1))
            client.jobs.wait(job["id"])
            ids.append(job["id"])
        kept = [job["id"] for job in client.jobs.list()]
        assert ids[0] not in kept
        assert ids[-1] in kept
        assert (
            len(client.jobs.list())
            + len([f for f in client.jobs.files() if f["purpose"] == "input"])
            <= 4
        )


def test_a_user_whose_jobs_all_run_gets_no_space() -> None:
    config = HEAD + "jobs-user-bytes-max = 20000\n" + CONFIG
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        stuck = client.jobs.submit(chats(4, "stuck"))
        with pytest.raises(QuotaExceeded, match="jobs-user-bytes-max"):
            client.jobs.submit(chats(300))
        assert len(client.jobs.list()) == 1
        client.jobs.cancel(stuck["id"])


def test_a_full_disk_of_all_users_deletes_nobody_elses_files() -> None:
    config = "jobs-bytes-max = 40000\n" + CONFIG
    with daemon_for_all(config) as daemon:
        with as_user(ADA):
            ada = Client(daemon.socket).open()
        with as_user(BOB):
            bob = Client(daemon.socket).open()
        with ada, bob:
            ada.jobs.upload(chats(40))
            done = ada.jobs.submit(chats(1))
            ada.jobs.wait(done["id"])
            small = bob.jobs.upload(chats(10))
            taken = sum(f["bytes"] for c in (ada, bob) for f in c.jobs.files())
            assert len(files_in(daemon)) == 4 and taken < 40000
            before = files_in(daemon)
            lines = [chat("x", text="y" * (40001 - taken))]
            with pytest.raises(QuotaExceeded, match="all users together") as refused:
                bob.jobs.upload([*chats(10), *lines])  # even without the user's own older file
            assert refused.value.data["bound"] == "jobs-bytes-max"
            assert files_in(daemon) == before
            newer = bob.jobs.upload(lines)  # in place of the user's own older file
            assert [file["id"] for file in bob.jobs.files()] == [newer["id"]]
            assert small["id"] != newer["id"] and len(files_in(daemon)) == 4
            sizes = [
                path.stat().st_size for path in (daemon.directory / "state/jobs").glob("*.jsonl")
            ]
            assert sum(sizes) <= 40000
            assert ada.jobs.get(done["id"])["state"] == "completed"


def test_ended_jobs_are_deleted_by_age() -> None:
    config = HEAD + "jobs-days-max = 0\n" + CONFIG
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        job = client.jobs.submit(chats(1))
        client.jobs.wait(job["id"])
        stuck = client.jobs.submit([chat("stuck", "stuck")])  # wakes the search
        wait_until(lambda: job["id"] not in [each["id"] for each in client.jobs.list()])
        assert len(client.jobs.list()) == 1
        client.jobs.cancel(stuck["id"])  # else its turn may have begun, and delays the shutdown


def test_a_swap_computes_the_rest_of_a_job_with_the_new_model() -> None:
    config = echo_model("m", slots=1, step_ms=10, variant="old")
    config += echo_model("new", slots=4, variant="new")
    with running_daemon(config) as daemon, Client(daemon.socket) as client:
        job = client.jobs.submit(chats(200, "m"))
        wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 3)
        # Holds the only slot, so that the swap finds a job that has requests left.
        blocker = client.jobs.submit([chat("b", "m", LONG)], priority="urgent")
        wait_until(lambda: any(task["priority"] == "urgent" for task in client.queue()))
        client.swap("m", "new")
        client.jobs.delete(blocker["id"])
        ended = client.jobs.wait(job["id"])
        assert (ended["state"], ended["completed"], ended["failed"]) == ("completed", 200, 0)
        results = [*client.jobs.results(job["id"])]
        assert {r["custom_id"]: text_of(r) for r in results} == {
            f"r{number}": f"hello r{number}" for number in range(200)
        }
        prints = [r["response"]["body"]["system_fingerprint"] for r in results]
        assert len({*prints}) == 2, "requests under way have ended with the old model"


def test_metrics_count_jobs_and_requests_by_state_and_outcome() -> None:
    with running_daemon(HEAD + CONFIG) as daemon, Client(daemon.socket) as client:
        done = client.jobs.submit([*chats(3), chat("none", "missing")])
        client.jobs.wait(done["id"])
        stuck = client.jobs.submit(chats(20, "stuck"))
        wait_until(lambda: client.jobs.get(stuck["id"])["running"] == JOB_REQUESTS_MAX)
        found = scrape_metrics(daemon)
        assert [found("jobs", state=state) for state in JOB_STATES] == [0, 1, 1, 0, 0, 0]
        requests = [found("job_requests", state=state) for state in ("waiting", "running")]
        assert requests == [20 - JOB_REQUESTS_MAX, JOB_REQUESTS_MAX]
        ended = [found("job_requests_ended_total", outcome=each) for each in REQUEST_OUTCOMES]
        assert ended == [3, 1, 0]
        sizes = [path.stat().st_size for path in (daemon.directory / "state/jobs").glob("*.jsonl")]
        assert found("job_bytes") == sum(sizes) > 0
        client.jobs.cancel(stuck["id"])
        client.jobs.delete(done["id"])
        found = scrape_metrics(daemon)
        assert found("job_requests_ended_total", outcome="given_up") == 20
        assert [found("jobs", state=state) for state in JOB_STATES] == [0, 0, 0, 1, 0, 0]
        assert found("job_requests", state="running") == 0


def test_a_removed_model_fails_the_rest_of_a_job() -> None:
    with running_daemon(HEAD + CONFIG) as daemon, Client(daemon.socket) as client:
        job = client.jobs.submit(chats(200, "slow"))
        wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 1)
        path = daemon.directory / "config.toml"
        path.write_text(path.read_text().replace("[models.slow", "[models.other"))
        os.kill(daemon.pid, signal.SIGHUP)
        wait_until(lambda: "config.read_again" in daemon.log)
        ended = client.jobs.wait(job["id"])
        assert ended["state"] == "completed" and ended["failed"] > 0
        statuses = Counter(r["response"]["status_code"] for r in client.jobs.results(job["id"]))
        assert statuses == {200: ended["completed"], 404: ended["failed"]}
        assert ended["completed"] + ended["failed"] == 200


def test_a_drained_daemon_takes_no_job_and_continues_its_own_after_the_restart() -> None:
    with running_daemon(HEAD + CONFIG) as daemon:
        with Client(daemon.socket) as client:
            job = client.jobs.submit(chats(60, "slow"))
            wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 1)
            client.drain()
            with pytest.raises(ShuttingDown):
                client.jobs.submit_file(job["input_file"])
            wait_until(lambda: not client.jobs.get(job["id"])["running"])
            drained = client.jobs.get(job["id"])
            assert (drained["state"], drained["failed"]) == ("running", 0)
            assert drained["completed"] < 60
        daemon.stop()
        stored = lines_of(daemon, job)
        assert len(stored) == drained["completed"]
        daemon.start_again()
        with Client(daemon.socket) as client:
            ended = client.jobs.wait(job["id"])
            assert (ended["completed"], ended["failed"]) == (60, 0)
            assert lines_of(daemon, job)[: len(stored)] == stored

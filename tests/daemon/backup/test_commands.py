"""`inferd backup` and `inferd restore` with a real daemon, which may run or have been killed."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import document, inferd, inferd_process
from tests.daemon.other_users import ADA
from tests.echo import echo_model
from tests.waiting import wait_until


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as daemon:
        yield daemon


def chat(daemon: RunningDaemon, text: str, name: str = "diary") -> None:
    with Client(daemon.socket) as client, client.session("echo", session_id=name) as session:
        session.chat(text)


def sessions_of(daemon: RunningDaemon) -> dict[str, int]:
    """Return the turns of each session."""
    with Client(daemon.socket) as client:
        return {str(s["session_id"]): s["turns"] for s in client.sessions(dormant=True)}


def run(daemon: RunningDaemon, *words: str | Path) -> Any:
    return inferd(*map(str, words), "--state-dir", str(daemon.directory / "state"), "--json")


def test_a_running_daemon_is_saved_and_a_killed_one_is_restored(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "backup.tar"
    chat(daemon, "before the backup")
    with Client(daemon.socket) as client, client.session("echo") as session:
        session.chat("once upon a time")
        session.save_state("tale")
    saved = run(daemon, "backup", file, "--kv")
    assert saved.exit_code == 0, saved.output
    assert document(saved)["files"] == ["jobs/jobs.db", "sessions.db", "states.db"]
    assert file.stat().st_mode & 0o777 == 0o600
    chat(daemon, "after the backup")
    chat(daemon, "after the backup", "other")

    refused = run(daemon, "restore", file)
    assert refused.exit_code == 4, refused.output  # it is busy
    assert "another daemon uses the state directory" in refused.output
    assert sessions_of(daemon) == {"diary": 2, "other": 1}

    daemon.kill()
    state = daemon.directory / "state"
    assert (state / "sessions.db-wal").stat().st_size
    restored = run(daemon, "restore", file)
    assert restored.exit_code == 0, restored.output
    previous = Path(document(restored)["previous"])
    assert (previous / "sessions.db-wal").stat().st_size
    assert not (state / "sessions.db-wal").exists()
    daemon.start_again()
    assert sessions_of(daemon) == {"diary": 1}
    with Client(daemon.socket) as client:
        assert [s["name"] for s in client.list_states()] == ["tale"]
    chat(daemon, "after the restoration")
    assert sessions_of(daemon) == {"diary": 2}

    daemon.stop()
    for path in state.glob("sessions.db*"):
        path.unlink()
    for path in previous.glob("sessions.db*"):
        path.rename(state / path.name)
    daemon.start_again()
    assert sessions_of(daemon) == {"diary": 2, "other": 1}, "the previous state is whole"


def test_a_daemon_finishes_a_restoration_that_was_killed(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    file, state = tmp_path / "backup.tar", daemon.directory / "state"
    chat(daemon, "before the backup")
    assert run(daemon, "backup", file).exit_code == 0
    chat(daemon, "after the backup")
    daemon.kill()
    for folder in ("old", "new"):
        (state / "restore.ready" / folder).mkdir(parents=True)
    with tarfile.open(file) as archive:
        archive.extract("sessions.db", state / "restore.ready" / "new", filter="data")
    daemon.start_again()
    assert sessions_of(daemon) == {"diary": 1}
    assert (state / "before-restore-1" / "sessions.db-wal").exists()
    assert not list(state.glob("restore.*"))


def test_a_daemon_that_cannot_finish_a_restoration_does_not_start(daemon: RunningDaemon) -> None:
    daemon.stop()
    state = daemon.directory / "state"
    (state / "restore.ready").mkdir()  # damaged: the folder of the old state is missing
    with pytest.raises(RuntimeError, match=r"restoration in .* cannot go on"):
        daemon.start_again()
    (state / "restore.ready").rmdir()
    daemon.start_again()


def test_a_backup_overwrites_nothing_and_leaves_no_part_of_one(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    file = tmp_path / "backup.tar"
    file.write_text("mine")
    refused = run(daemon, "backup", file)
    assert refused.exit_code == 1 and "exists already" in refused.output
    assert file.read_text() == "mine"
    file.unlink()
    failed = inferd("backup", str(file), "--state-dir", str(tmp_path))
    assert failed.exit_code == 1 and "no state of a daemon" in failed.output
    assert not file.exists()
    missing = run(daemon, "restore", file)
    assert missing.exit_code == 1 and "cannot be opened" in missing.output


def test_files_that_root_restores_belong_to_the_daemon_s_user(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    file, state = tmp_path / "backup.tar", tmp_path / "state"
    chat(daemon, "hello")
    tmp_path.chmod(0o755)
    state.mkdir(mode=0o700)
    os.chown(state, ADA, ADA)
    assert run(daemon, "backup", file).exit_code == 0
    (state / "models.json").symlink_to("/etc/passwd")
    for parent in tmp_path.parents:
        if parent.stat().st_uid == os.getuid() and parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)
    with inferd_process("restore", str(file), "--state-dir", str(state)) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (output, errors)
    assert {(p.stat().st_uid, p.stat().st_gid) for p in state.glob("*.db")} == {(ADA, ADA)}
    assert (state / "lock").stat().st_uid == ADA
    assert (state / "before-restore-1" / "models.json").is_symlink()


def test_a_restored_job_goes_on_where_it_was_when_it_was_saved(tmp_path: Path) -> None:
    file, count = tmp_path / "backup.tar", 60
    with running_daemon(echo_model("slow", slots=1, step_ms=10)) as daemon:
        with Client(daemon.socket) as client:
            job = client.jobs.submit(
                {"url": "/v1/completions", "body": {"model": "slow", "prompt": f"text {number}"}}
                for number in range(count)
            )
            wait_until(lambda: client.jobs.get(job["id"])["completed"] >= 3)
            assert run(daemon, "backup", file).exit_code == 0
            client.jobs.delete(job["id"])
        daemon.stop()
        assert run(daemon, "restore", file).exit_code == 0
        daemon.start_again()
        with Client(daemon.socket) as client:
            ended = client.jobs.wait(job["id"])
            assert (ended["state"], ended["completed"], ended["failed"]) == ("completed", count, 0)
            results = [*client.jobs.results(job["id"])]
        texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results}
        assert len(results) == count
        assert texts == {f"request-{number + 1}": f"text {number}" for number in range(count)}

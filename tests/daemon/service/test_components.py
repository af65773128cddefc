"""Failures of optional components: the daemon continues and reports them."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import anyio
import pytest

from inferd import Client
from inferd.daemon.components import COMPONENTS, Components
from inferd.daemon.state_files import SETTINGS_FILE
from inferd.testing import RunningDaemon, running_daemon
from tests.daemon.command_line import inferd
from tests.daemon.manager import manager_of, serving
from tests.journal_versions import mark_version
from tests.raw import RawClient


def part(daemon: RunningDaemon, name: str) -> dict[str, Any]:
    """Return the state of a component, after the daemon has answered a turn."""
    with Client(daemon.socket) as client:
        with client.session("echo") as session:
            assert session.chat("served") == "served"
        return next(p for p in client.stats()["components"] if p["component"] == name)


def check(daemon: RunningDaemon, name: str, cause: str) -> None:
    """Check that a component fails with *cause*, and that all reports show it."""
    found = part(daemon, name)
    assert not found["up"]
    assert cause in found["cause"]
    assert found["remedy"] and found["effect"] and found["failing_s"] >= 0
    line = next(x for x in inferd("status", socket=daemon.socket).stdout.splitlines() if name in x)
    for reported in ("effect", "cause", "remedy"):
        assert found[reported] in line
    assert any(
        "component.failing" in x and f"component={name}" in x for x in daemon.log.splitlines()
    )


def talk(daemon: RunningDaemon, text: str = "hello") -> None:
    """Run a turn in a session with an id and close it, which writes its history and KV state."""
    with Client(daemon.socket) as client, client.session("echo", session_id="diary") as session:
        session.chat(text)


def limit(pid: int, size: int) -> None:
    """Limit the files of a process to *size* bytes: its writes fail as on a full disk."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_all_components_work_in_a_daemon_without_faults() -> None:
    with running_daemon() as daemon, Client(daemon.socket) as client:
        parts = client.stats()["components"]
        assert [p["component"] for p in parts] == list(COMPONENTS)
        assert all(p["up"] and p["cause"] is None for p in parts)
        assert "fails" not in inferd("status", socket=daemon.socket).stdout


def test_model_files_that_do_not_exist_until_they_do() -> None:
    config = '[models.gone]\nfile = "gone.gguf"\n'
    with running_daemon(config) as daemon:
        file = daemon.directory / "gone.gguf"
        check(daemon, "model-files", f"[models.gone]: {file} does not exist")
        file.touch()
        assert part(daemon, "model-files")["up"]


def test_state_a_file_in_the_place_of_the_directory() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        state = daemon.directory / "state"
        state.rename(daemon.directory / "aside")
        state.touch()
        daemon.start_again()
        check(daemon, "state", f"{state}: File exists")
        check(daemon, "journal", "")


def test_the_journal_on_a_full_disk_later_and_written_again() -> None:
    with running_daemon() as daemon, manager_of(daemon) as manager:
        talk(daemon, "x" * 1500)
        limit(daemon.pid, len(daemon.log) + 4096)
        talk(daemon, "full")
        assert manager.status("serving; degraded: journal (")
        check(daemon, "journal", "")
        limit(daemon.pid, resource.RLIM_INFINITY)
        talk(daemon, "room")
        manager.serves()
        assert part(daemon, "journal")["up"]
        assert "component.recovered" in daemon.log


def test_the_journal_damaged_at_the_start() -> None:
    with running_daemon() as daemon:
        talk(daemon)
        daemon.stop()
        path = daemon.directory / "state" / "sessions.db"
        data = path.read_bytes()
        path.write_bytes(data[:5000] + b"\0" * len(data[5000:]))
        daemon.start_again()
        check(daemon, "journal", "a file was set aside as ")
        with Client(daemon.socket) as client, client.session("echo", session_id="new") as session:
            session.chat("hello")
            assert session.metadata["durable"] is True


def test_the_journal_of_a_newer_version() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        mark_version(daemon.directory / "state" / "sessions.db", 1000)
        daemon.start_again()
        check(daemon, "journal", "newer version of inferd")
        assert "start the newer version" in part(daemon, "journal")["remedy"]


def test_the_kv_store_a_file_in_the_place_of_its_folder_until_it_is_moved() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        folder = daemon.directory / "state" / "kv"
        if folder.exists():
            folder.rename(daemon.directory / "aside")
        folder.touch()
        daemon.start_again()
        with manager_of(daemon) as manager:
            talk(daemon, "x" * 1500)
            assert manager.status("serving; degraded: kv-store (")
            check(daemon, "kv-store", "File exists")
            folder.unlink()
            talk(daemon, "y" * 500)
            manager.serves()
            assert part(daemon, "kv-store")["up"]


def test_the_kv_store_on_a_full_disk_later() -> None:
    with running_daemon() as daemon, manager_of(daemon) as manager:
        talk(daemon)
        with RawClient(daemon.socket) as client:
            [model] = [m for m in client.call("models")["models"] if m["name"] == "echo"]
        limit(model["pid"], 100)
        talk(daemon, "x" * 2000)
        assert manager.status("serving; degraded: kv-store (")
        check(daemon, "kv-store", "File too large")


def test_runtime_settings_of_models_are_written_once_the_disk_allows() -> None:
    with running_daemon() as daemon, manager_of(daemon) as manager, Client(daemon.socket) as client:
        obstacle = (daemon.directory / "state" / SETTINGS_FILE).with_suffix(".new")
        obstacle.mkdir()
        client.pin("echo")
        assert manager.status("serving; degraded: models (")
        check(daemon, "models", "Is a directory")
        obstacle.rmdir()
        client.unpin("echo")
        manager.serves()
        assert part(daemon, "models")["up"]


def test_the_models_directory_that_cannot_be_read_for_a_while(tmp_path: Path) -> None:
    folder, aside = tmp_path / "models", tmp_path / "aside"
    folder.mkdir()
    (folder / "here.gguf").write_bytes(b"GGUF")
    with running_daemon(models_dir=folder) as daemon, Client(daemon.socket) as client:
        folder.rename(aside)
        folder.touch()
        assert "here" in [model["name"] for model in client.models()]
        check(daemon, "models-dir", f"{folder}: Not a directory")
        folder.unlink()
        aside.rename(folder)
        (folder / "here.gguf").rename(folder / "new.gguf")
        assert [model["name"] for model in client.models()] == ["echo", "new"]
        assert part(daemon, "models-dir")["up"]


@pytest.mark.asyncio
async def test_a_component_whose_work_fails_ends_alone() -> None:
    parts = Components()

    async def watch() -> None:
        raise OSError("no /proc/stat")

    async with anyio.create_task_group() as group:
        group.start_soon(parts.run_component, "cores", watch)
    assert parts.line == "serving; degraded: cores (OSError('no /proc/stat'))"


def test_systemd_is_notified_of_a_failing_component_with_readiness() -> None:
    with running_daemon() as daemon:
        daemon.stop()
        starts = daemon.directory / "state" / "starts"
        starts.unlink()
        starts.mkdir()
        path = str(daemon.directory / "notify")
        with manager_of(daemon) as manager, serving(daemon, {"NOTIFY_SOCKET": path}):
            reported = manager.until(lambda m: "READY" in m)["STATUS"]
        assert reported.startswith("serving; degraded: state (")
        assert reported.endswith("Is a directory)")


def test_a_service_manager_that_has_exited(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        daemon.stop()
        with serving(daemon, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}):
            check(daemon, "notify", "No such file or directory")


def test_an_extra_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "uvloop.py").write_text("raise OSError('libuv.so.1: cannot open')\n")
    with running_daemon() as daemon:
        daemon.stop()
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        with serving(daemon, {"PYTHONPATH": path}):
            check(daemon, "uvloop", "libuv.so.1: cannot open")


def test_a_failure_and_its_end_are_reported_once_each() -> None:
    now = 10.0
    reported: list[str] = []
    parts = Components(lambda: now)
    parts.on_change = reported.append
    for cause in ("full", "full", "fuller"):
        parts.note("journal", cause)
    now = 13.0
    assert parts.line == "serving; degraded: journal (fuller)"
    [journal] = [p for p in parts.describe() if p["component"] == "journal"]
    assert (journal["cause"], journal["failing_s"]) == ("fuller", 3.0)
    parts.note("kv-store", "two\nlines")
    assert parts.line == "serving; degraded: journal (fuller), kv-store (two lines)"
    for _ in range(2):
        parts.note("journal", None)
        parts.note("kv-store", None)
    assert reported == ["journal", "kv-store", "journal", "kv-store"]
    assert parts.line == "serving"


def test_only_known_components_can_fail() -> None:
    with pytest.raises(KeyError):
        Components().note("engine", "gone")

"""Installation of the service: shown, executed below a root or here, and removed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from inferd.backends.errors import InvalidArgument
from inferd.daemon.service.install import Service, check_reachable, executable, install_plan
from tests.daemon.command_line import document, inferd
from tests.daemon.systemd_tools import SYSTEMD, directives, run_tool

SYSTEM_FILES = {
    "etc/sysusers.d/inferd.conf",
    "etc/tmpfiles.d/inferd.conf",
    "etc/inferd/config.toml",
    "etc/systemd/system/inferd.service",
    "etc/systemd/system/inferd.socket",
}
GPU = "etc/systemd/system/inferd.service.d/gpu.conf"


def files(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run as a user with a separate home."""
    for name in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a systemctl into PATH that records its calls, and fails on request."""
    tools = tmp_path / "tools"
    tools.mkdir()
    tool = tools / "systemctl"
    tool.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n'
        f'case "$*" in *"$(cat {tmp_path}/fails 2>/dev/null || echo nothing)"*)'
        " echo 'Failed to connect to bus' >&2; exit 1;; esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return tmp_path / "called"


def test_every_file_and_command_is_shown_and_nothing_is_done(tmp_path: Path) -> None:
    shown = inferd("install-service", "--gpu", "--root", str(tmp_path))
    assert shown.exit_code == 0
    for file in (*SYSTEM_FILES, GPU):
        assert f"write   {tmp_path}/{file}\n" in shown.stdout
    shipped = (SYSTEMD / "system" / "inferd.socket").read_text().splitlines()
    assert all(f"        {line}".rstrip() in shown.stdout.splitlines() for line in shipped)
    for command in ("systemctl daemon-reload", "systemctl enable --now inferd.socket"):
        assert f"run     {command}\n" in shown.stdout
    assert "--apply runs these steps" in shown.stderr
    assert files(tmp_path) == set()


@pytest.mark.parametrize("gpu", [False, True])
def test_below_a_root_the_files_are_correct_and_start_this_inferd(
    gpu: bool, tmp_path: Path
) -> None:
    flags = ("--gpu",) if gpu else ()
    done = inferd("install-service", "--apply", "--root", str(tmp_path), *flags)
    assert done.exit_code == 0, done.stderr
    assert files(tmp_path) == SYSTEM_FILES | ({GPU} if gpu else set())
    service = tmp_path / "etc/systemd/system/inferd.service"
    assert directives(service)["ExecStart"] == [f"{executable()} serve"]
    version = subprocess.run(
        [*executable().split(), "--version"], capture_output=True, text=True, timeout=60
    )
    assert version.stdout.startswith("inferd ")
    verified = run_tool("systemd-analyze", "verify", "--man=no", str(service))
    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_second_install_replaces_changed_files_except_the_configuration(tmp_path: Path) -> None:
    arguments = ("install-service", "--apply", "--json", "--root", str(tmp_path))
    inferd(*arguments)
    (tmp_path / "etc/inferd/config.toml").write_text("mine")
    socket = tmp_path / "etc/systemd/system/inferd.socket"
    socket.write_text("older")
    steps = document(inferd(*arguments))["steps"]
    actions = {Path(s["path"]).name: s["action"] for s in steps if "path" in s}
    assert actions["config.toml"] == "keep" and actions["inferd.socket"] == "replace"
    assert actions["inferd.service"] == "same"
    assert (tmp_path / "etc/inferd/config.toml").read_text() == "mine"
    assert socket.read_text() == (SYSTEMD / "system" / "inferd.socket").read_text()


def test_uninstall_leaves_only_user_data_and_purge_nothing(tmp_path: Path) -> None:
    root = ("--root", str(tmp_path))
    inferd("install-service", "--apply", "--gpu", *root)
    own = tmp_path / "etc/systemd/system/inferd.service.d/override.conf"
    own.write_text("[Service]\n")
    sessions = tmp_path / "var/lib/inferd/sessions.db"
    sessions.parent.mkdir(parents=True)
    sessions.touch()
    kept = {"etc/inferd/config.toml", str(own.relative_to(tmp_path)), "var/lib/inferd/sessions.db"}

    before = files(tmp_path)
    assert inferd("uninstall-service", "--purge", *root).exit_code == 0
    assert files(tmp_path) == before, "only shown"
    assert inferd("uninstall-service", "--apply", *root).exit_code == 0
    assert files(tmp_path) == kept
    own.unlink()
    assert inferd("uninstall-service", "--apply", "--purge", *root).exit_code == 0
    assert files(tmp_path) == set()
    assert inferd("uninstall-service", "--apply", *root).exit_code == 0, "there is nothing"


def test_a_user_s_service_is_written_and_its_commands_run(home: Path, commands: Path) -> None:
    done = inferd("install-service", "--user", "--apply")
    assert done.exit_code == 0, done.stderr
    units = home / "config" / "systemd" / "user"
    assert files(units) == {"inferd.service", "inferd.socket"}
    assert commands.read_text().splitlines() == [
        "--user daemon-reload",
        "--user enable --now inferd.socket",
        "--user try-restart inferd.service",
    ]
    (home / "data" / "inferd" / "models").mkdir(parents=True)
    commands.unlink()
    assert inferd("uninstall-service", "--user", "--purge", "--apply").exit_code == 0
    assert commands.read_text().splitlines() == [
        "--user disable --now inferd.socket inferd.service",
        "--user daemon-reload",
        "--user reset-failed inferd.service inferd.socket",
    ]
    assert files(units) == set() and not (home / "data" / "inferd").exists()


def test_a_failed_command_is_reported_and_can_be_repeated(home: Path, commands: Path) -> None:
    (home / "fails").write_text("enable")
    done = inferd("install-service", "--user", "--apply")
    assert done.exit_code == 1
    assert "`systemctl --user enable --now inferd.socket` failed: Failed to connect" in done.stderr
    (home / "fails").write_text("nothing")
    assert inferd("install-service", "--user", "--apply").exit_code == 0
    (home / "fails").write_text("disable")
    assert inferd("uninstall-service", "--user", "--apply").exit_code == 0, "it was not running"


def test_installing_without_permission_or_systemd_is_refused(
    monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    done = inferd("uninstall-service", "--apply")
    assert done.exit_code == 1 and "sudo, or --user" in done.stderr
    monkeypatch.setenv("PATH", str(home))
    done = inferd("install-service", "--user", "--apply")
    assert done.exit_code == 1 and "systemctl was not found" in done.stderr
    assert files(home) == set()
    (home / "file").touch()
    done = inferd("install-service", "--apply", "--root", str(home / "file"))
    assert done.exit_code == 1 and "Not a directory" in done.stderr


def test_an_inferd_hidden_from_the_service_is_refused() -> None:
    for place in ("/home/ada/venv/bin/inferd", "/root/x/inferd", "/tmp/inferd"):
        with pytest.raises(InvalidArgument, match="hidden from the service"):
            check_reachable(place)
    with pytest.raises(InvalidArgument, match="not possible in a unit"):
        install_plan(Service(), "/opt/100%/inferd")
    assert inferd("install-service", "--user", "--gpu").exit_code == 2

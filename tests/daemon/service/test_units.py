"""The shipped units: correct, hardened, and the daemon works under their restrictions."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.testing import RunningDaemon
from tests.daemon.systemd_tools import SYSTEMD, directives, make_folders, run_tool
from tests.models import short_smollm2
from tests.raw import RawClient

from .test_lifecycle import worker_of

SYSTEM = SYSTEMD / "system"
SERVICES = [SYSTEM / "inferd.service", SYSTEMD / "user" / "inferd.service"]


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """Copy the system units, with an existing program as the one to start."""
    folder = tmp_path / "units"
    shutil.copytree(SYSTEM, folder)
    startable(folder / "inferd.service")
    return folder


def startable(service: Path) -> None:
    text = service.read_text()
    assert "ExecStart=/usr/local/bin/inferd serve\n" in text
    service.write_text(text.replace("/usr/local/bin/inferd", sys.executable))


def exposure(unit: Path) -> float:
    """Return the exposure of a service by `systemd-analyze security`, from 0 to 10."""
    rating = run_tool(
        "systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)
    ).stdout
    return float(rating.rsplit("Overall exposure level", 1)[1].split(":")[1].split()[0])


@pytest.mark.parametrize("gpu", [False, True])
def test_the_system_units_are_correct(units: Path, gpu: bool) -> None:
    if not gpu:
        shutil.rmtree(units / "inferd.service.d")
    names = [str(units / name) for name in ("inferd.service", "inferd.socket")]
    done = run_tool("systemd-analyze", "verify", "--man=no", *names)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_user_s_units_are_correct(tmp_path: Path) -> None:
    shutil.copytree(SYSTEMD / "user", tmp_path / "units")
    startable(tmp_path / "units" / "inferd.service")
    names = [str(tmp_path / "units" / name) for name in ("inferd.service", "inferd.socket")]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = run_tool("systemd-analyze", "verify", "--user", "--man=no", *names, env=environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("gpu", "most"), [(False, 1.2), (True, 2.0)])
def test_the_system_service_is_hardly_exposed(units: Path, gpu: bool, most: float) -> None:
    if not gpu:
        shutil.rmtree(units / "inferd.service.d")
    service = units / "inferd.service"
    assert 0.0 < exposure(service) <= most
    threshold = f"--threshold={round(most * 10)}"
    done = run_tool("systemd-analyze", "security", "--offline=true", threshold, str(service))
    assert done.returncode == 0


def test_the_rating_detects_a_service_that_is_not_hardened() -> None:
    assert exposure(SERVICES[1]) > 8.0


@pytest.mark.parametrize("service", SERVICES, ids=lambda path: path.parent.name)
def test_the_unit_has_the_settings_that_the_daemon_relies_on(service: Path) -> None:
    unit = directives(service)
    wanted = {
        "Type": "notify",  # systemd 252 does not know notify-reload
        "NotifyAccess": "main",
        "KillMode": "mixed",
        "OOMPolicy": "continue",
        "Restart": "on-failure",
        "StartLimitIntervalSec": "0",
        "UMask": "0077",
        "NoNewPrivileges": "yes",
    }
    assert {name: unit[name] for name in wanted} == {n: [v] for n, v in wanted.items()}
    assert int(unit["WatchdogSec"][0]) >= 10
    assert unit["ExecReload"][0] == "/bin/kill -HUP $MAINPID"


def test_peers_keep_their_names_and_memory_and_cores_can_be_read() -> None:
    for path in SYSTEM.rglob("*.*"):
        if path.is_file():
            unit = directives(path)
            assert "PrivateUsers" not in unit and "DynamicUser" not in unit
            assert unit.get("ProcSubset") in (None, ["all"])
    user = directives(SYSTEMD / "user" / "inferd.service")
    # In a user's manager each of these makes a user namespace.
    assert not {"PrivateTmp", "PrivateDevices", "ProtectSystem", "ProtectHome"} & set(user)


def test_the_socket_is_the_group_s() -> None:
    unit = directives(SYSTEM / "inferd.socket")
    assert unit["ListenStream"] == ["/run/inferd/inferd.sock"]
    assert (unit["SocketGroup"], unit["SocketMode"]) == (["inferd"], ["0660"])
    service = directives(SYSTEM / "inferd.service")
    assert "INFERD_SOCKET=/run/inferd/inferd.sock" in service["Environment"]
    # Its end would take the socket, which stays for the next daemon.
    assert "RuntimeDirectory" not in service


def test_the_user_and_the_folders_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    users = str(SYSTEMD / "sysusers.d" / "inferd.conf")
    done = run_tool("systemd-sysusers", f"--root={tmp_path}", users)
    assert done.returncode == 0, done.stderr
    make_folders(tmp_path, SYSTEMD / "tmpfiles.d" / "inferd.conf")
    [user] = (tmp_path / "etc" / "passwd").read_text().splitlines()
    assert user.startswith("inferd:x:") and user.endswith(":/var/lib/inferd:/usr/sbin/nologin")
    models = tmp_path / "var/lib/inferd/models"
    assert models.is_dir() and models.stat().st_mode & 0o777 == 0o750
    assert models.stat().st_uid == (os.geteuid() or int(user.split(":")[2]))


class ConfinedDaemon(RunningDaemon):
    """A daemon under the system call filter of the system unit."""

    def _command(self) -> list[str]:
        unit = str(SYSTEM / "inferd.service")
        return [sys.executable, "-m", "tests.daemon.service.under_unit", unit, *super()._command()]


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SYSTEMD.parent)


@pytest.mark.usefixtures("from_the_root")
def test_the_daemon_serves_under_the_unit_s_filter_and_its_workers_go_first() -> None:
    with ConfinedDaemon("[daemon]\nkeep-alive-s = -1\n") as daemon:
        assert "Seccomp:\t2\n" in Path(f"/proc/{daemon.pid}/status").read_text()
        with Client(daemon.socket) as client, client.session("echo", session_id="x") as session:
            assert session.chat("hello") == "hello"
            assert session.metadata["durable"] is True
            assert all(part["up"] for part in client.stats()["components"])
        with RawClient(daemon.socket) as raw:
            worker = worker_of(raw, "echo")
        assert Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip() == "500"
        assert "Seccomp_filters:\t2\n" in Path(f"/proc/{worker.pid}/status").read_text()


@pytest.mark.model
@pytest.mark.usefixtures("from_the_root")
def test_a_real_model_answers_under_the_unit_s_filter() -> None:
    config = f'[models.m]\nfile = "{short_smollm2()}"\nctx-size = 512\nslots = 2\n'
    options: dict[str, Any] = {"n-predict": 8, "ignore-eos": True, "grammar": 'root ::= "a"+'}
    with (
        ConfinedDaemon(config) as daemon,
        Client(daemon.socket) as client,
        client.session("m", raw=True) as session,
    ):
        assert set(session.chat("Once", options=options)) == {"a"}


@pytest.mark.usefixtures("from_the_root")
def test_the_filter_refuses_what_the_unit_forbids() -> None:
    """Without a filter the tests above would pass, too."""
    script = (
        "import ctypes, errno, mmap, os\n"
        "for forbidden in (\n"
        "    lambda: os.setuid(os.getuid()),\n"
        "    lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),\n"
        "    lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC),\n"
        "    lambda: os.chroot('/'),\n"
        "):\n"
        "    try:\n"
        "        forbidden()\n"
        "    except PermissionError:\n"
        "        print('refused')\n"
    )
    module = ["-m", "tests.daemon.service.under_unit", str(SYSTEM / "inferd.service")]
    done = run_tool(sys.executable, *module, sys.executable, "-c", script)
    assert done.stdout.splitlines() == ["refused"] * 4, done.stderr

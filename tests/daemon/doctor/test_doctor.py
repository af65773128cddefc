"""The whole command `inferd doctor`, with and without a daemon: its output and its time limits."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from inferd import Client
from inferd.backends.errors import InvalidArgument
from inferd.backends.library import install_command
from inferd.cli.operations.doctor_command import _show
from inferd.daemon.doctor.checks.connection import CONNECTION_S_MAX, ConnectionFacts
from inferd.daemon.doctor.checks.units import Units
from inferd.daemon.doctor.examination import Facts, _socket, check_all
from inferd.daemon.doctor.finding import ok, warn
from inferd.daemon.doctor.report import write_new
from inferd.testing import running_daemon
from tests.daemon.command_line import document, inferd, inferd_process
from tests.daemon.other_users import ADA, as_user
from tests.fork_server import ForkedProcess
from tests.tiny_gguf import write_tiny

NOWHERE = "/nonexistent/inferd.sock"
SECRET = "the moon is made of cheese"
CHECKS = [
    "inferd", "packages", "engine", "cpu", "gpu", "media", "configuration", "models", "state",
    "service", "socket", "memory", "limits", "tuning", "cores", "users",
]  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a user without a configuration, models or state."""
    for name in ("CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr("subprocess.Popen", ForkedProcess)
    for name in ("CONFIG", "MODELS_DIR", "STATE_DIR"):
        monkeypatch.delenv(f"INFERD_{name}", raising=False)
    return tmp_path


def findings(result: Any, check: str) -> list[dict[str, str]]:
    return [f for f in document(result)["findings"] if f["check"] == check]


def test_without_a_daemon_it_examines_the_rest(home: Path) -> None:
    (home / "data" / "inferd" / "models").mkdir(parents=True)
    write_tiny("llama", home / "data" / "inferd" / "models")
    result = inferd("doctor", "--json", socket=NOWHERE)
    printed = document(result)
    assert result.exit_code == (1 if printed["status"] == "fail" else 0)
    assert list(dict.fromkeys(f["check"] for f in printed["findings"])) == CHECKS
    assert all(f["remedy"] for f in printed["findings"] if f["status"] != "ok")
    by_check = {check: findings(result, check)[0]["status"] for check in CHECKS}
    for check in ("inferd", "packages", "engine", "configuration", "models", "cores"):
        assert by_check[check] == "ok", findings(result, check)
    [listening] = findings(result, "socket")
    assert f"no daemon listens at {NOWHERE}" in listening["found"]


def test_a_failed_check_has_a_remedy_and_exits_with_1(home: Path) -> None:
    models = home / "data" / "inferd" / "models"
    models.mkdir(parents=True)
    file = write_tiny("llama", models)
    file.write_bytes(file.read_bytes()[:-500])
    (home / "config" / "inferd").mkdir(parents=True)
    (home / "config" / "inferd" / "config.toml").write_text("[models.gone]\nfile = 'gone.gguf'\n")
    result = inferd("doctor", socket=NOWHERE)
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "fail models" in words and "is cut off" in words and "→ download the file again" in words
    assert "[models.gone]" in words and "Traceback" not in result.output
    (home / "config" / "inferd" / "config.toml").write_text("[daemon]\ncores = -1\n")
    wrong = inferd("doctor", "--json", socket=NOWHERE)
    assert wrong.exit_code == 1
    assert "cores: -1 is outside" in findings(wrong, "configuration")[0]["found"]


def test_it_goes_on_after_an_error_of_the_configuration(home: Path) -> None:
    file, models = home / "c.toml", home / "models"
    models.mkdir()
    (models / "gone.gguf").symlink_to("/none")
    file.write_text(f"[daemon]\nmodels-dir = '{models}'\nsessions-max = 'x'\n")
    found = inferd("doctor", "--config", str(file))
    assert found.exit_code == 1 and "'x' is not a whole number" in found.stdout
    assert "gone.gguf is not offered as a model: it is a link" in found.stdout
    assert re.search(r"^ok +state +", found.stdout, re.M)


def test_one_warning_is_counted_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    _show([warn("one", "do it"), ok("fine")])
    assert capsys.readouterr().out.endswith("1 ok, 1 warning, 0 failed\n")
    _show([warn("one", "do it"), warn("two", "do it")])
    assert capsys.readouterr().out.endswith("0 ok, 2 warnings, 0 failed\n")


def test_the_state_of_a_running_daemon_is_checked() -> None:
    with running_daemon() as daemon:
        result = inferd("doctor", "--json", socket=daemon.socket)
        assert "is open to you" in findings(result, "socket")[0]["found"]
        [answer] = findings(result, "daemon")
        assert answer["status"] == "ok" and f"pid {daemon.pid}" in answer["found"]


def test_a_failing_component_of_the_daemon_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with running_daemon(metrics=str(tmp_path / "taken" / "figures.sock")) as daemon:
        printed = findings(inferd("doctor", "--json", socket=daemon.socket), "daemon")
        assert any(f["status"] == "warn" and "metrics fails" in f["found"] for f in printed)


def test_a_daemon_that_hangs_does_not_hang_the_doctor(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen()
        begin = time.monotonic()
        result = inferd("doctor", "--json", socket=str(path))
        assert time.monotonic() - begin < CONNECTION_S_MAX + 20
    [hanging] = findings(result, "daemon")
    assert hanging["status"] == "fail" and "did not answer within" in hanging["found"]


def test_a_socket_left_by_a_crashed_daemon_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    [left] = findings(inferd("doctor", "--json", socket=str(path)), "socket")
    assert left["status"] == "warn" and "was left by a daemon that has crashed" in left["found"]


def test_missing_packages_of_the_daemon_are_named() -> None:
    code = """if True:
        import importlib.metadata as metadata, sys
        gone = {"structlog", "psutil", "numpy", "jinja2", "prometheus_client", "llama_cpp"}
        sys.modules |= dict.fromkeys(gone)
        version = metadata.version
        def missing(name):
            if name.replace("-", "_").removesuffix("_python") in gone:
                raise metadata.PackageNotFoundError(name)
            return version(name)
        metadata.version = missing
        from inferd.cli import main
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor"],
        env={**os.environ, "INFERD_SOCKET": NOWHERE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    words = " ".join(done.stdout.split())
    assert done.stderr == "" and "psutil, structlog: not installed" in words
    assert install_command("daemon") in words and "\nengine" not in done.stdout


# The report.


def test_the_report_has_no_texts_of_users(tmp_path: Path) -> None:
    config = f"[daemon]\nsessions-max = 77\n[defaults]\nstop = ['{SECRET}']\n"
    file = tmp_path / "report.txt"
    with (
        running_daemon(config) as daemon,
        Client(daemon.socket) as client,
        client.session("echo", session_id="my-diary", system=SECRET) as session,
    ):
        session.chat(SECRET)
        own = str(daemon.directory / "config.toml")
        flags = ("--report", str(file), "--config", own)
        result = inferd("doctor", *flags, socket=daemon.socket)
        pid = daemon.pid
    assert str(file) in result.stderr
    text = file.read_text()
    assert SECRET not in text and "my-diary" not in text
    assert 'stop = "(1 items)"' in text and "sessions-max = 77" in text
    for part in ("## findings", "## versions", "## configuration", "## daemon"):
        assert part in text
    assert "llama-cpp-python 0" in text and f"pid {pid}" in text and '"sessions": 1' in text
    assert '"component": "kv-store"' in text
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_report_overwrites_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    file.write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    for path in (file, link):
        result = inferd("doctor", "--report", str(path), socket=NOWHERE)
        assert result.exit_code == 1
        assert "exists already" in result.stderr and "name another file" in result.stderr
    assert file.read_text() == "mine" and not (tmp_path / "elsewhere").exists()
    nowhere = inferd("doctor", "--report", str(tmp_path / "none" / "r"), socket=NOWHERE)
    assert nowhere.exit_code == 1 and "cannot be written: No such file" in nowhere.stderr


# Errors.


def test_a_report_on_a_full_disk_leaves_no_partial_file() -> None:
    with pytest.raises(InvalidArgument, match="cannot be written: File too large"):
        limited(Path("/dev/shm") / f"inferd-report-{os.getpid()}")


def limited(path: Path) -> None:
    """Write a report with a limit of ten bytes for files."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        write_new(path, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
        assert not path.exists()


def test_names_that_are_not_utf8_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    monkeypatch.setenv("INFERD_MODELS_DIR", folder)
    for flags in ((), ("--json",), ("--report", str(tmp_path / "report"))):
        output, errors = outputs("doctor", *flags)
        assert "internal error" not in errors and "udcff" in output
    assert "udcff" in (tmp_path / "report").read_text()
    shown = json.loads(outputs("config", "show", "--json")[0])
    assert shown["settings"]["models-dir"]["value"] == folder


def outputs(*arguments: str) -> list[str]:
    """Return what a command writes to its standard output and error."""
    with inferd_process(*arguments, socket=NOWHERE) as process:
        return [text.decode() for text in process.communicate(timeout=90)]


def test_a_runtime_folder_of_another_user_is_not_an_error(tmp_path: Path) -> None:
    with as_user(ADA):
        found = _socket(None, {"XDG_RUNTIME_DIR": "/root/run"})
    assert found == Path("/root/run/inferd/inferd.sock")


def test_unknown_data_of_another_version_does_not_end_the_examination() -> None:
    reach = ConnectionFacts(
        NOWHERE, exists=True, is_socket=True, software="x", stats={"components": [{"a": 1}]}
    )
    findings = check_all(Facts(connection=reach))
    assert any("cannot read its data" in f.found and f.status == "warn" for f in findings)
    assert [f for f in findings if f.check == "socket"], "the others are made"


def test_a_unit_with_unclosed_quotes_is_read() -> None:
    units = Units(user=False, directives={"Environment": ['A=1 "B=2', "C=3"]}, outdated=[])
    assert units.environment == {"A": "1", '"B': "2", "C": "3"}


def test_a_command_without_standard_output_ends_as_any_other() -> None:
    command = f"{sys.executable} -m inferd config check"
    for closed in (">&-", ">&- 2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(["sh", "-c", f"exec {command} {closed}"], timeout=60, stderr=-1)
        assert (done.returncode, done.stderr) == (0, b"")

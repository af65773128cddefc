"""An upgrade replaces files while a daemon runs: its old code then starts workers of the new."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import inferd
from inferd import Client
from inferd.backends.errors import LoadFailed
from inferd.testing import running_daemon
from tests.echo import echo_model

CONFIG = echo_model("before") + echo_model("after")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the package, from which the test's daemons are started."""
    package = tmp_path / "inferd"
    source = Path(inferd.__file__).parent
    shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package


@pytest.mark.parametrize(
    "module",
    [
        "scheduler/messages/commands.py",
        "scheduler/recording/recorder.py",
        "backends/model_spec.py",
        "wire/frames.py",
    ],
)
def test_a_daemon_whose_files_were_replaced_requires_a_restart(
    installed: Path, module: str
) -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client, client.session("before") as session:
            assert session.chat("hello") == "hello"
            with (installed / module).open("a") as file:
                file.write("# of the next version\n")
            with pytest.raises(LoadFailed, match="another version of inferd") as refused:
                client.session("after").__enter__().chat("hello")
            assert refused.value.data["cause"] == "upgraded"
            assert "restart the daemon" in refused.value.hint
            assert session.chat("again") == "again", "loaded models still serve"
        daemon.stop()
        daemon.start_again()
        with Client(daemon.socket) as client, client.session("after") as session:
            assert session.chat("hello") == "hello"


def test_replaced_files_that_no_worker_uses_do_not_matter(installed: Path) -> None:
    with running_daemon(CONFIG) as daemon, Client(daemon.socket) as client:
        with (installed / "daemon" / "cli" / "app.py").open("a") as file:
            file.write("# of the next version\n")
        with client.session("after") as session:
            assert session.chat("hello") == "hello"

"""An upgrade replaces files while a daemon runs: its old code then starts workers of the new."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import inferd
from inferd import Client
from inferd.backends.errors import LoadFailed
from inferd.testing import running_daemon
from tests.echo import echo_model

CONFIG = echo_model("before") + echo_model("after")
MODULES = (
    "scheduler/messages.py",
    "scheduler/record.py",
    "backends/model_spec.py",
    "wire/frames.py",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the package with its compiled modules, from which the module's daemons start."""
    folder = tmp_path_factory.mktemp("installed")
    unfinished = "*.pyc.*"  # other processes may compile modules meanwhile
    others = shutil.ignore_patterns("docs", unfinished)
    shutil.copytree(Path(inferd.__file__).parent, folder / "inferd", ignore=others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        yield folder / "inferd"


@contextmanager
def replaced(file: Path) -> Iterator[None]:
    """Replace a file of the package in the block."""
    content = file.read_bytes()
    file.write_bytes(content + b"# of the next version\n")
    try:
        yield
    finally:
        file.write_bytes(content)


def test_a_daemon_whose_files_were_replaced_requires_a_restart(installed: Path) -> None:
    with running_daemon(CONFIG) as daemon:
        with Client(daemon.socket) as client, client.session("before") as session:
            assert session.chat("hello") == "hello"
            for module in MODULES:
                with replaced(installed / module):
                    check_refused(client)
                    assert session.chat("again") == "again", "loaded models still serve"
        daemon.stop()
        with replaced(installed / MODULES[0]):
            daemon.start_again()
            with Client(daemon.socket) as client, client.session("after") as session:
                assert session.chat("hello") == "hello"


def check_refused(client: Client) -> None:
    """Check that the model that is not loaded cannot be."""
    with pytest.raises(LoadFailed, match="another version of inferd") as refused:
        client.session("after").__enter__().chat("hello")
    assert refused.value.data["cause"] == "upgraded"
    assert "restart the daemon" in refused.value.hint


def test_replaced_files_that_no_worker_uses_do_not_matter(installed: Path) -> None:
    with (
        running_daemon(CONFIG) as daemon,
        Client(daemon.socket) as client,
        replaced(installed / "cli" / "app.py"),
        client.session("after") as session,
    ):
        assert session.chat("hello") == "hello"

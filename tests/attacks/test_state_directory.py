"""Two daemons on one state directory: the second is refused, and the first loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from inferd import Client
from inferd.backends.errors import Busy
from inferd.daemon.components import Components
from inferd.daemon.state_lock import LOCK_FILE, STARTS_FILE, StateDirectory
from inferd.testing import RunningDaemon, running_daemon

ECHO = "[models.echo]\nbackend = 'echo'\n"


def serve_beside(daemon: RunningDaemon, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run another daemon on the same state, with a socket of its own, until it ends."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "inferd", "serve", "--metrics", "off"),
            *("--socket", str(folder / "other.sock")),
            *("--models-dir", str(daemon.directory / "models")),
            *("--state-dir", str(daemon.directory / "state")),
        ],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def is_durable(client: Client) -> bool:
    """Return whether a turn of a session with an id is written down."""
    with client.session("echo", session_id="diary") as session:
        session.chat("hello")
        return bool(session.metadata["durable"])


def test_a_second_daemon_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    with running_daemon(ECHO) as daemon, Client(daemon.socket) as client:
        assert is_durable(client)

        second = serve_beside(daemon, tmp_path)

        assert second.returncode == 1
        assert f"the process {daemon.pid}, which listens on {daemon.socket}" in second.stderr
        assert "--state-dir" in second.stderr
        assert is_durable(client)
        assert (daemon.directory / "state" / STARTS_FILE).read_text() == "1\n"


def test_the_lock_of_a_killed_daemon_is_free() -> None:
    with running_daemon(ECHO) as daemon:
        with Client(daemon.socket) as client:
            assert is_durable(client)
        killed = daemon.pid
        daemon.kill()
        assert str(killed) in (daemon.directory / "state" / LOCK_FILE).read_text()

        daemon.start_again()

        with Client(daemon.socket) as client:
            assert is_durable(client)
            [state] = [c for c in client.stats()["components"] if c["component"] == "state"]
            assert state["up"]


def test_a_lock_names_its_holder_until_it_is_closed(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path / "state"), StateDirectory(tmp_path / "state")
    assert first.open("/run/a", Components()) == 1
    with pytest.raises(Busy, match="listens on /run/a") as caught:
        second.open("/run/b", Components())
    assert caught.value.data["socket"] == "/run/a" and "/run/a" in caught.value.hint
    first.close()
    assert second.open("/run/b", Components()) == 2
    with pytest.raises(Busy, match="listens on /run/b"):
        first.open("/run/a", Components())
    second.close()


def test_a_lock_file_without_a_name_still_refuses(tmp_path: Path) -> None:
    first, second = StateDirectory(tmp_path), StateDirectory(tmp_path)
    first.open("/run/a", Components())
    (tmp_path / LOCK_FILE).write_bytes(b"")
    with pytest.raises(Busy, match="another daemon uses"):
        second.open("/run/b", Components())
    first.close()


def test_a_directory_that_cannot_be_locked_does_not_stop_the_daemon(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    components, state = Components(), StateDirectory(tmp_path)
    assert state.open("/run/a", components) > 1e9
    assert "state" in components.line
    state.close()

"""Two daemons on one state directory: the second is refused, and the first loses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from inferd import Client
from inferd.backends.errors import Busy
from inferd.daemon.components import Components
from inferd.daemon.state_lock import LOCK_FILE, STARTS_FILE, StateDirectory
from inferd.testing import RunningDaemon, running_daemon
from tests.tiny_gguf import write_tiny

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
        timeout=60,
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


class _WithUmask(RunningDaemon):
    """A daemon that is started with a umask, on a state directory that exists and all may read."""

    umask = ""
    _start_process: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen

    def _command(self) -> list[str]:
        (self.directory / "state").mkdir(mode=0o755, exist_ok=True)
        return ["sh", "-c", f'umask {self.umask}; exec "$0" "$@"', *super()._command()]


@pytest.mark.parametrize("umask", ["000", "022", "077", "007"])
def test_only_the_daemons_user_reads_its_files_whatever_the_umask(
    umask: str, tmp_path: Path
) -> None:
    model = write_tiny("llama", tmp_path)
    daemon = _WithUmask(f"{ECHO}[models.tiny]\nfile = '{model}'\nctx-size = 256\n")
    daemon.umask = umask
    with daemon:
        with Client(daemon.socket) as client, client.session("tiny", session_id="kept") as session:
            session.chat("hello", options={"n-predict": 2})
            client.save_state(session.context, "named")
            client.pin("echo")
        assert daemon.stop() == 0
        found = {path: path.stat().st_mode & 0o777 for path in daemon.directory.glob("state/**/*")}
        names = {path.name for path in found}
        assert {LOCK_FILE, STARTS_FILE, "sessions.db", "states.db", "models.json", "kv"} <= names
        assert any(path.is_file() and "kv" in path.parts for path in found)
        wrong = {str(p): oct(m) for p, m in found.items() if m != (0o700 if p.is_dir() else 0o600)}
        assert not wrong


def test_the_mode_of_a_file_that_was_left_does_not_stay(tmp_path: Path) -> None:
    left = tmp_path / f"{STARTS_FILE}.new"
    left.write_text("garbage that is long")
    left.chmod(0o666)
    directory = StateDirectory(tmp_path)
    assert directory.open("/run/a.sock", Components()) == 1
    directory.close()
    assert (tmp_path / STARTS_FILE).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / STARTS_FILE).read_text() == "1\n" and not left.exists()


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

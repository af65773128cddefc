"""A real daemon for tests: `running_daemon` starts one on the echo model and stops it again.

>>> with running_daemon() as daemon, inferd.Client(daemon.socket) as client:
...     with client.session("echo") as session:
...         assert session.chat("hello") == "hello"

It is a process of its own, with a socket, models directory and state of its own in a temporary
folder. Works as ``with`` and as ``async with``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import anyio.to_thread

__all__ = ("RunningDaemon", "running_daemon")

START_S_MAX = 30.0
STOP_S_MAX = 30.0


class RunningDaemon:
    """A daemon process. `socket` is the path for clients, `log` what it has logged so far."""

    def __init__(
        self, config: str = "", models_dir: Path | str | None = None, metrics: str | None = None
    ):
        self._config = config
        self._models_dir = models_dir
        self._metrics = metrics
        self.directory = Path()
        self.socket = ""
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self.process is not None, "the daemon is not started"
        return self.process.pid

    @property
    def log(self) -> str:
        """What the daemon has written to its standard error."""
        return (self.directory / "log").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which `inferd` commands talk to this daemon."""
        return {**os.environ, "INFERD_SOCKET": self.socket}

    def start(self) -> None:
        """Start the daemon and wait until its socket answers.

        :raises RuntimeError: it ended before that; the message holds its log.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="inferd-"))
        self.socket = str(self.directory / "run" / "inferd.sock")
        (self.directory / "config.toml").write_text(self._config)
        (self.directory / "models").mkdir()
        self.start_again()

    def start_again(self) -> None:
        """Start a daemon on the same files, after the one before has ended."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            path = str(self.directory / "notify")
            Path(path).unlink(missing_ok=True)
            notify.bind(path)
            notify.settimeout(START_S_MAX)
            with (self.directory / "log").open("ab") as log:
                self.process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**os.environ, "NOTIFY_SOCKET": path},
                    pass_fds=self._descriptors(),
                )
            self._wait_until_ready(notify)

    def _descriptors(self) -> tuple[int, ...]:
        return ()

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "inferd", "serve"),
            *("--config", str(self.directory / "config.toml")),
            *("--socket", self.socket),
            *("--models-dir", str(self._models_dir or self.directory / "models")),
            *("--state-dir", str(self.directory / "state")),
            *("--metrics", self._metrics or str(self.directory / "metrics.sock")),
        ]

    def _wait_until_ready(self, notify: socket.socket) -> None:
        assert self.process is not None
        notify.settimeout(0.2)
        for _ in range(int(START_S_MAX / 0.2)):
            try:
                if b"READY=1" in notify.recv(4096):
                    return
            except TimeoutError:
                if self.process.poll() is not None:
                    break
        self.kill()
        raise RuntimeError(f"the daemon did not start:\n{self.log}")

    def stop(self) -> int:
        """Stop the daemon as systemd does and return its exit status.

        :raises RuntimeError: it did not end; the message holds its log.
        """
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise RuntimeError(f"the daemon did not stop:\n{self.log}") from None

    def kill(self) -> None:
        """End the daemon as kill -9 does; its workers go with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> RunningDaemon:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    async def __aenter__(self) -> RunningDaemon:
        await anyio.to_thread.run_sync(self.start)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__, kind, error, traceback)


def running_daemon(
    config: str = "", *, models_dir: Path | str | None = None, metrics: str | None = None
) -> RunningDaemon:
    """Return a daemon to be used as a context manager.

    *config* is the text of a configuration file, *models_dir* a folder of GGUF files; without
    them there is the model `echo`. *metrics* is where its figures are served; without it, on a
    Unix socket of its own, `metrics.sock` in its directory.
    """
    return RunningDaemon(config, models_dir, metrics)

"""A real daemon for tests: `running_daemon` starts it with the echo model, and stops it.

>>> with running_daemon() as daemon, inferd.Client(daemon.socket) as client:
...     with client.session("echo") as session:
...         assert session.chat("hello") == "hello"

The daemon is a separate process, with its socket, models directory and state in a temporary
folder. `with` and `async with` both work.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import ClassVar

import anyio.to_thread

__all__ = ("RunningDaemon", "running_daemon")

START_S_MAX = 30.0
STOP_S_MAX = 30.0


class _ServiceManager:
    """A service manager in place of systemd, which receives the daemon's state until `close`."""

    def __init__(self, path: Path):
        path.unlink(missing_ok=True)
        self.ready = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read_state, daemon=True)
        self._thread.start()

    def _read_state(self) -> None:
        while message := self._socket.recv(4096):
            if b"READY=1" in message.split(b"\n"):
                self.ready.set()

    def close(self) -> None:
        """Stop receiving."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()


class RunningDaemon:
    """A daemon process; `socket` is the path for clients."""

    _start_process: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen

    def __init__(
        self, config: str = "", models_dir: Path | str | None = None, metrics: str | None = None
    ):
        self._config = config
        self._models_dir = models_dir
        self._metrics = metrics
        self.directory = Path()
        self.socket = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._manager: _ServiceManager | None = None

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        assert self.process is not None, "the daemon is not started"
        return self.process.pid

    @property
    def log(self) -> str:
        """The text that the daemon has written to its standard error so far."""
        return (self.directory / "log").read_text()

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which `inferd` commands connect to this daemon."""
        return {**os.environ, "INFERD_SOCKET": self.socket}

    def start(self) -> None:
        """Start the daemon and wait until it is ready.

        :raises RuntimeError: the daemon did not start; the message has its log.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="inferd-"))
        self.socket = str(self.directory / "run" / "inferd.sock")
        (self.directory / "config.toml").write_text(self._config)
        (self.directory / "models").mkdir()
        self.start_again()

    def start_again(self) -> None:
        """Start another daemon on the same files, after the previous one has ended."""
        self._close_manager()
        path = self.directory / "notify"
        self._manager = _ServiceManager(path)
        with (self.directory / "log").open("ab") as log:
            self.process = self._start_process(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "NOTIFY_SOCKET": str(path)},
                pass_fds=self._descriptors(),
            )
        self._wait_until_ready(self._manager.ready)

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

    def _wait_until_ready(self, ready: threading.Event) -> None:
        assert self.process is not None
        for _ in range(int(START_S_MAX / 0.2)):
            if ready.wait(0.2):
                return
            if self.process.poll() is not None:
                break
        self.kill()
        raise RuntimeError(f"the daemon did not start:\n{self.log}")

    def stop(self) -> int:
        """Stop the daemon as systemd does, and return its exit status.

        :raises RuntimeError: the daemon did not stop; the message has its log.
        """
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            if not self._has_ended_within(STOP_S_MAX):
                self.kill()
                raise RuntimeError(f"the daemon did not stop:\n{self.log}")
        self._close_manager()
        return self.process.wait()

    def _has_ended_within(self, seconds: float) -> bool:
        """Wait for the process's end; `Popen.wait` with a timeout would notice it 50 ms later."""
        descriptor = os.pidfd_open(self.pid)
        try:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            return bool(ended.poll(1000 * seconds))
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """Kill the daemon with SIGKILL; its workers end with it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._close_manager()

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def __enter__(self) -> RunningDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    async def __aenter__(self) -> RunningDaemon:
        await anyio.to_thread.run_sync(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__)


def running_daemon(
    config: str = "", *, models_dir: Path | str | None = None, metrics: str | None = None
) -> RunningDaemon:
    """Return a daemon to use as a context manager.

    *config* is the text of a configuration file, *models_dir* a folder of GGUF files. Without
    them the daemon has the model `echo`. *metrics* is the address at which it serves its metrics;
    the default is the Unix socket `metrics.sock` in its directory.
    """
    return RunningDaemon(config, models_dir, metrics)

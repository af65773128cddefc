"""A machine for the commands of docs/operations.md: a folder instead of `/`, and systemd's part.

It has the part of systemd that the service needs, with the units that were installed in the folder.

Commands of inferd and of files are run. Those of systemctl are carried out here. Commands that need
packages, users or a running manager have no effect.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from inferd.daemon.service.install import executable
from tests.daemon.activated_daemon import LAUNCH
from tests.daemon.manager import Manager
from tests.daemon.systemd_tools import directives, make_folders, run_tool
from tests.fork_server import ForkedProcess

__all__ = ("Machine",)

PLACES = ("/var/lib", "/etc", "/run", "/opt", "/usr/local/bin")
ELSEWHERE = {"apt", "export", "python3", "pip", "ln", "usermod", "journalctl", "loginctl"}
"""Commands that need packages, users, or the machine's manager."""
FILES = {"rm", "install"}
UNITS = {"inferd", "inferd.service", "inferd.socket"}
INFERD = (sys.executable, "-m", "inferd")
FREE = {"INFERD_METRICS": "127.0.0.1:0"}
"""The address of the metrics: another daemon may have the default port."""
EXEC = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "inferd.socket"}
os.execv(sys.argv[2], sys.argv[2:])
"""
"""The steps of systemd before it starts a service with its opened socket; LAUNCH is the same with
the service in one process.
"""


class Machine:
    """Runs the commands of the page below *root*."""

    def __init__(self, root: Path):
        self.root = root
        self.home = root / "home"
        for folder in ("home", "run/inferd", "var/lib", "etc", "opt/inferd", "usr/local/bin"):
            (root / folder).mkdir(parents=True)
        (root / "usr/local/bin/inferd").touch()
        self.socket = root / "run/inferd/inferd.sock"
        self.service: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self.done: list[str] = []
        self.replacements: dict[str, str] = {}
        self._manager = Manager(root / "run" / "notify")
        self._listener: socket.socket | None = None

    def command(self, line: str) -> str:
        """Run a line of the page, and return its output."""
        words = shlex.split(line, comments=True)
        if words[0] == "sudo":
            words = words[3:] if words[1] == "-u" else words[1:]
            words = words[1:] if words[0].startswith("--preserve-env=") else words
        words = [self.replacements.get(word, word) for word in words]
        tool = Path(words[0]).name
        self.done.append(tool)
        if tool == "inferd":
            return self._inferd(words[1:])
        if tool == "systemctl":
            return self._systemctl([w for w in words[1:] if not w.startswith("-")])
        if tool in FILES:
            return self._run([tool, *(self._below(w) for w in _unowned(words[1:]))])
        assert tool in ELSEWHERE, f"an unknown command: {line!r}"
        return ""

    def close(self) -> None:
        """Stop the service and close the socket; stop a daemon that `inferd start` has started."""
        self._stop_service()
        self._close_socket()
        if self.socket.exists():
            self._run([*INFERD, "stop", "--now"])
        self._manager.socket.close()

    def _below(self, word: str) -> str:
        option, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            return f"{option}={self._below(value)}"
        return f"{self.root}{word}" if word.startswith(PLACES) else word

    def _run(self, words: list[str]) -> str:
        environ = {name: v for name, v in os.environ.items() if not name.startswith("INFERD_")}
        for name in ("CONFIG", "STATE", "DATA"):
            environ[f"XDG_{name}_HOME"] = str(self.home / name.lower())
        process = ForkedProcess(
            words,
            cwd=self.home,
            env=environ | {"INFERD_SOCKET": str(self.socket)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with process:
            output, errors = (text.decode() for text in process.communicate(timeout=100))
        assert process.returncode == 0, f"{words}: {output}{errors}"
        return output + errors

    def _inferd(self, words: list[str]) -> str:
        command = [*INFERD, *(self._below(w) for w in words)]
        if words[0] not in ("install-service", "uninstall-service"):
            if self.service is None and self._listener is not None:
                self._start_service()  # as the first connection does
            return self._run(command)
        steps = msgspec.json.decode(self._run([*command, "--root", str(self.root), "--json"]))
        if steps["applied"] and "--user" not in words:
            for step in steps["steps"]:
                if step["action"] == "run":
                    self._step(step["command"])
        return self._run([*command, "--root", str(self.root), "--dry-run"])

    def _step(self, words: list[str]) -> None:
        """Run a command of the installer."""
        if words[0] == "systemctl":
            self._systemctl([w for w in words[1:] if not w.startswith("-")])
        elif words[0] == "systemd-tmpfiles":
            make_folders(self.root, Path(self._below(words[-1])))
            os.chown(self.root / "var/lib/inferd", os.getuid(), os.getgid())  # the service's user
        elif words[0] == "systemd-sysusers":
            done = run_tool(words[0], f"--root={self.root}", self._below(words[-1]))
            assert done.returncode == 0, done.stderr
        else:
            assert words[0] in ("userdel", "groupdel"), words

    # The part of systemd.

    def _systemctl(self, words: list[str]) -> str:
        verb, units = words[0], words[1:]
        assert set(units) <= UNITS, units
        has_socket, has_service = "inferd.socket" in units, units != ["inferd.socket"]
        match verb:
            case "enable" | "start":
                assert units == ["inferd.socket"]
                self._open_socket()
            case "disable" | "stop":
                if has_service:
                    self._stop_service()
                if has_socket:
                    self._close_socket()
            case "reload":
                self._reload()
            case "restart" | "try-restart":
                if self.service is not None:
                    self._stop_service()
                    self._start_service()
            case "status":
                return "\n".join(m["STATUS"] for m in self._manager.messages if "STATUS" in m)
            case _:
                assert verb in ("daemon-reload", "reset-failed"), verb
        return ""

    @property
    def _unit(self) -> dict[str, list[str]]:
        return directives(self.root / "etc/systemd/system/inferd.service")

    def _open_socket(self) -> None:
        if self._listener is None:
            unit = directives(self.root / "etc/systemd/system/inferd.socket")
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(f"{self.root}{unit['ListenStream'][0]}")
            os.chmod(self.socket, int(unit["SocketMode"][0], 8))
            self._listener.listen(128)

    def _close_socket(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.socket.unlink()

    def _start_service(self) -> None:
        assert self._listener is not None
        given = dict(pair.split("=", 1) for pair in self._unit["Environment"])
        environ = {name: self._below(value) for name, value in given.items()}
        with (self.root / "log").open("ab") as log:
            self.service = ForkedProcess(
                self._start_command(self._listener.fileno()),
                env={**os.environ, **environ, **FREE, "NOTIFY_SOCKET": str(self._manager.path)},
                pass_fds=(self._listener.fileno(),),
                stderr=log,
            )
        self._manager.until(lambda m: "READY" in m)

    def _start_command(self, number: int) -> list[str]:
        """Return the command that starts the service with the socket *number*: as systemd does at
        first, later in a process that is forked.
        """
        self._starts += 1
        program, *arguments = shlex.split(self._unit["ExecStart"][0])
        if self._starts == 1:
            return [sys.executable, "-c", EXEC, str(number), program, *arguments]
        assert program == executable() and arguments[0] == "serve"
        return [sys.executable, "-c", LAUNCH, *arguments, str(number)]

    def _stop_service(self) -> None:
        if self.service is not None:
            self.service.send_signal(signal.SIGTERM)
            self._manager.until(lambda m: "STOPPING" in m)
            assert self.service.wait(30) == 0
            self.service = None

    def _reload(self) -> None:
        assert self.service is not None
        assert self._unit["ExecReload"][0] == "/bin/kill -HUP $MAINPID"
        self.service.send_signal(signal.SIGHUP)
        self._manager.until(lambda m: "RELOADING" in m)
        self._manager.until(lambda m: "READY" in m)


def _unowned(words: list[str]) -> list[str]:
    """Return *words* without the options for owners, which are not users here."""
    found = list(words)
    for option in ("-o", "-g"):
        if option in found:
            at = found.index(option)
            del found[at : at + 2]
    return found

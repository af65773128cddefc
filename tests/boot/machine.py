"""A machine that is booted for tests: systemd is its first process, in namespaces of its own.

It has its own files (in memory, except this machine's `/usr`, to be read), processes, network,
name and cgroups; this machine keeps nothing of it. `boot.sh` says what is there.
"""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

import psutil

import inferd

__all__ = ("BootedMachine", "CannotBoot", "Ended")

BOOT_S_MAX = 30.0
COMMAND_S_MAX = 60.0
END_S_MAX = 60.0
FOLDER = Path(__file__).parent
GROUP_PREFIX = "inferd-tests-"
NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net")
SYSTEMD = "/usr/lib/systemd/systemd"
TOOLS = ("ip", "ldconfig", "nsenter", "pivot_root", "setpriv", "systemctl", "unshare", "usermod")
Ended = subprocess.CompletedProcess[str]


class CannotBoot(Exception):
    """The reason why systemd cannot be the first process of a machine here."""


class BootedMachine:
    """A context manager that removes the machine; `boot` starts it, `console` is its output."""

    def __init__(self) -> None:
        self.console = b""
        self._process: subprocess.Popen[bytes] | None = None
        self._init: psutil.Process | None = None

    @property
    def pid(self) -> int:
        """Its first process, as this machine numbers it."""
        assert self._init is not None
        return self._init.pid

    @property
    def root(self) -> Path:
        """Its files."""
        return Path(f"/proc/{self.pid}/root")

    def run(self, *command: str, user: str = "", check: bool = True) -> Ended:
        """Run a command there, as *user*; with *check* it must succeed."""
        inside = self._inside(command, user)
        done = subprocess.run(inside, capture_output=True, text=True, timeout=COMMAND_S_MAX)
        assert not check or done.returncode == 0, (
            f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}"
        )
        return done

    def start(
        self, *command: str, stdin: int | None = None, stdout: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command there."""
        return subprocess.Popen(self._inside(command), text=True, stdin=stdin, stdout=stdout)

    def _inside(self, command: Sequence[str], user: str = "") -> list[str]:
        becoming = [f"--reuid={user}", f"--regid={user}", "--init-groups"] if user else []
        path = "/usr/local/bin:/usr/bin:/usr/sbin"
        return [
            *("nsenter", f"--target={self.pid}", *NAMESPACES, "--cgroup"),
            *("env", "-i", f"PATH={path}", "LANG=C.UTF-8", "HOME=/root", "SYSTEMD_PAGER="),
            *("setpriv", "--pdeathsig=KILL", *becoming),  # it goes with nsenter
            *command,
        ]

    def boot(self) -> None:
        """Start systemd there, and wait until all of its first target is up.

        :raises CannotBoot: that is not possible here; the message says why.
        """
        check_tools()
        self._group = make_group()
        self._folder = Path(tempfile.mkdtemp(prefix="inferd-boot-"))
        try:
            self._boot()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> BootedMachine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _boot(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
            notify_socket.bind(str(self._folder / "notify"))
            notify_socket.settimeout(0.1)
            ours, theirs = pty.openpty()
            try:
                self._process = subprocess.Popen(
                    self._command(os.ttyname(theirs)), stdin=subprocess.DEVNULL, stderr=theirs
                )
                self._reader = threading.Thread(target=self._read_console, args=(ours,))
                self._reader.start()
            finally:
                os.close(theirs)
            self._wait_until_booted(notify_socket)
        [self._init] = psutil.Process(self._process.pid).children()

    def _command(self, console: str) -> list[str]:
        packages = str(Path(inferd.__file__).parent)
        arguments = (str(self._folder), sys.base_prefix, sysconfig.get_path("purelib"), packages)
        return [
            # If this process is killed with -9, the machine is killed with it.
            *("setpriv", "--pdeathsig=KILL"),
            *("unshare", *NAMESPACES, "--fork", "--kill-child=KILL"),
            *("sh", str(FOLDER / "boot.sh"), str(self._group), console, *arguments),
        ]

    def _read_console(self, ours: int) -> None:
        with contextlib.suppress(OSError):  # the last one who had it open is gone
            while said := os.read(ours, 4096):
                self.console += said
        os.close(ours)

    def _wait_until_booted(self, notify_socket: socket.socket) -> None:
        assert self._process is not None
        end = time.monotonic() + BOOT_S_MAX
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(TimeoutError):
                if b"READY=1" in notify_socket.recv(4096).split(b"\n"):
                    return
        status = self._process.poll()
        self._end()  # the rest of what was said
        said = self.console.decode(errors="replace").strip()
        raise CannotBoot(f"{'it hangs' if status is None else f'status {status}'}: {said}")

    def _end(self) -> None:
        if self._process is not None:
            if self._init is not None and self._process.poll() is None:
                self._init.kill()  # and with it all its processes; who started it ends last
            else:
                self._process.kill()
            self._process.wait(END_S_MAX)
            self._reader.join(END_S_MAX)
            self._process = None
        remove_group(self._group)
        shutil.rmtree(self._folder, ignore_errors=True)


def check_tools() -> None:
    """Check the requirements of booting.

    :raises CannotBoot: something is missing.
    """
    if os.geteuid() != 0:
        raise CannotBoot("that is for root alone")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    missing += [path for path in (SYSTEMD,) if not Path(path).exists()]
    if missing:
        raise CannotBoot(f"{', '.join(missing)} missing: apt install systemd iproute2")


def make_group() -> Path:
    """Make a cgroup for a machine, beside this process's; remove those that were left.

    :raises CannotBoot: there is no hierarchy of version 2 that may be written to.
    """
    top = _hierarchy()
    for left in top.glob(f"{GROUP_PREFIX}*"):
        remove_group(left)
    try:
        return Path(tempfile.mkdtemp(prefix=GROUP_PREFIX, dir=top))
    except OSError as exc:
        raise CannotBoot(f"no cgroup can be made: {exc}") from None


@cache
def _hierarchy() -> Path:
    for mount in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, *_ = mount.split()
        if kind == "cgroup2":
            [own] = [
                line[3:]
                for line in Path("/proc/self/cgroup").read_text().splitlines()
                if line.startswith("0::")
            ]
            return Path(where) / own.lstrip("/")
    raise CannotBoot("no cgroup2 is mounted")


def remove_group(group: Path) -> None:
    """Remove a cgroup and those below it; one that has processes stays."""
    for folder, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(folder)

"""Installation and removal of the service: a plan of files and commands, and its execution.

The files are those of `systemd/`, with the path of the inferd that installs them.
"""

from __future__ import annotations

import importlib.resources
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ...backends.errors import BackendError, InvalidArgument, PermissionDenied, UnsupportedOperation
from ...ipc.paths import runtime_folder

BOOTED = Path("/run/systemd/system")
"""It exists where systemd runs (`sd_booted(3)`)."""


def installed_service(
    socket: Path, environ: Mapping[str, str] = os.environ, root: Path | None = None
) -> Service | None:
    """Return the installed service that listens on *socket*; units are looked up below *root*."""
    for user in (True, False):
        service = Service(user=user, root=root)
        if str(socket) in sockets_of(service, environ):
            return service
    return None


def sockets_of(service: Service, environ: Mapping[str, str]) -> list[str]:
    """Return the paths on which an installed service listens, none if it is not installed."""
    runtime = str(runtime_folder(environ) or "") if service.user else "/run"
    try:
        streams = directives_of([service.units / UNITS[1]]).get("ListenStream", [])
    except PermissionError:  # HOME is that of another user, as after `su`
        return []
    return [stream.replace("%t", runtime) for stream in streams]


def directives_of(units: Sequence[Path]) -> dict[str, list[str]]:
    """Return the values of the existing *units* by directive, in order."""
    found: dict[str, list[str]] = {}
    for unit in units:
        for line in unit.read_text(errors="replace").splitlines() if unit.exists() else ():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith(("#", ";")):
                found.setdefault(name.strip(), []).append(value.strip())
    return found


SHIPPED = "/usr/local/bin/inferd"
"""The executable in `ExecStart=` of the shipped files."""
UNITS = ("inferd.service", "inferd.socket")
GPU_DROP_IN = "inferd.service.d/gpu.conf"
SYSTEM_FILES = ("sysusers.d/inferd.conf", "tmpfiles.d/inferd.conf")
SYSTEM_DATA = ("/etc/inferd", "/var/lib/inferd", "/run/inferd")
USER_DATA = (
    platformdirs.user_config_path,
    platformdirs.user_state_path,
    platformdirs.user_data_path,
)
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""Folders hidden from the system service by `ProtectHome=` and `PrivateTmp=`."""
COMMAND_S_MAX = 120.0
CONFIG = """\
# inferd's configuration. `systemctl reload inferd` reads it again; a file with an error changes
# nothing, and `inferd status` shows the error. Models in /var/lib/inferd/models need no entry.
[daemon]
# keep-alive-s = 1800

# [models.notes]
# file = "smollm2.gguf"
# temp = 0.2
"""
_PLAIN = re.compile(r"[A-Za-z0-9/._+@ -]+")


@dataclass(frozen=True)
class Write:
    """Write *text* to a file; with *keep* an existing file stays."""

    path: Path
    text: str
    keep: bool = False

    @property
    def action(self) -> str:
        """The effect on the current file: write, replace, keep, or same."""
        if not self.path.exists():
            return "write"
        if self.keep:
            return "keep"
        return "same" if self.path.read_text(errors="replace") == self.text else "replace"

    def run(self) -> None:
        """Write the file, unless its present state is kept."""
        if self.action in ("write", "replace"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_name(f"{self.path.name}.new")
            new.write_text(self.text)
            new.chmod(0o644)
            new.replace(self.path)


@dataclass(frozen=True)
class Remove:
    """Remove a folder, or a file and its drop-in folder if that is then empty."""

    path: Path

    @property
    def action(self) -> str:
        """The effect on the current file: remove, or absent if there is none."""
        return "remove" if os.path.lexists(self.path) else "absent"

    def run(self) -> None:
        """Remove the file or folder if it exists."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        elif self.action == "remove":
            self.path.unlink()
            if self.path.parent.suffix == ".d" and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()


@dataclass(frozen=True)
class Run:
    """Run a command; with *may_fail* a failure means that there was nothing to do."""

    command: tuple[str, ...]
    may_fail: bool = False
    action = "run"

    def run(self) -> None:
        """Run the command.

        :raises BackendError: it failed, or took more than `COMMAND_S_MAX`.
        """
        text = " ".join(self.command)
        try:
            done = subprocess.run(
                self.command, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            raise BackendError(f"`{text}` took more than {COMMAND_S_MAX:g} s") from None
        if done.returncode and not self.may_fail:
            raise BackendError(
                f"`{text}` failed: {done.stderr.strip() or done.returncode}",
                hint="correct this and run the command again: completed steps stay",
            )


Step = Write | Remove | Run


@dataclass(frozen=True)
class Service:
    """The system's service, or a *user*'s. With *root* all paths are below that folder, for another
    machine, and no command runs.
    """

    user: bool = False
    gpu: bool = False
    root: Path | None = None

    @property
    def units(self) -> Path:
        """The folder of the units."""
        if self.user:
            return self.under(platformdirs.user_config_path() / "systemd" / "user")
        return self.under(Path("/etc/systemd/system"))

    def under(self, path: Path) -> Path:
        """Return an absolute path below the root."""
        return path if self.root is None else self.root / path.relative_to("/")

    def systemctl(self, *arguments: str, may_fail: bool = False) -> Run:
        """Return a systemctl command for the service's manager."""
        scope = ("--user",) if self.user else ()
        return Run(("systemctl", *scope, *arguments), may_fail)


def executable() -> str:
    """Return the command that starts this inferd."""
    called = Path(sys.argv[0]).absolute()
    beside = Path(sys.executable).with_name("inferd")
    for path in (called, beside):
        if path.name == "inferd" and path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return f"{sys.executable} -m inferd"


def check_reachable(start: str) -> None:
    """Check that the system service can start this inferd.

    :raises InvalidArgument: it is in a folder that is hidden from the service.
    """
    for path in map(os.path.realpath, (start.split(" ")[0], sys.executable, sys.prefix, __file__)):
        if any(Path(path).is_relative_to(hidden) for hidden in HIDDEN):
            raise InvalidArgument(
                f"{path} is hidden from the service, as are all homes and temporary folders",
                hint="install inferd where all users can read it, as in `python3 -m venv"
                " /opt/inferd`, or use --user",
            )


def install_plan(service: Service, start: str) -> list[Step]:
    """Return the steps that install the service with the command *start*.

    :raises InvalidArgument: *start* has characters with a special meaning in a unit.
    """
    if not _PLAIN.fullmatch(start):
        raise InvalidArgument(
            f"{start!r} is not possible in a unit",
            hint="install inferd in a folder without special characters in its path",
        )
    scope = "user" if service.user else "system"
    units = [
        Write(service.units / name, _shipped(f"{scope}/{name}").replace(SHIPPED, start))
        for name in UNITS
    ]
    starts = [
        service.systemctl("daemon-reload"),
        service.systemctl("enable", "--now", "inferd.socket"),
        service.systemctl("try-restart", "inferd.service"),
    ]
    if service.user:
        return [*units, *starts]
    gpu = service.units / GPU_DROP_IN
    return [
        *(Write(service.under(Path("/etc", name)), _shipped(name)) for name in SYSTEM_FILES),
        Write(service.under(Path("/etc/inferd/config.toml")), CONFIG, keep=True),
        *units,
        Write(gpu, _shipped(f"system/{GPU_DROP_IN}")) if service.gpu else Remove(gpu),
        Run(("systemd-sysusers", "/etc/sysusers.d/inferd.conf")),
        Run(("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/inferd.conf")),
        *starts,
    ]


def _shipped(name: str) -> str:
    return (importlib.resources.files("inferd") / "systemd" / name).read_text()


def uninstall_plan(service: Service, *, purge: bool) -> list[Step]:
    """Return the steps that remove the service; with *purge* also its sessions and models."""
    files = [service.units / name for name in UNITS]
    data = [path("inferd") for path in USER_DATA]
    accounts: list[Step] = []
    if not service.user:
        files += [service.units / GPU_DROP_IN]
        files += [service.under(Path("/etc", name)) for name in SYSTEM_FILES]
        data = [Path(path) for path in SYSTEM_DATA]
        # userdel leaves a group with other members.
        accounts = [Run((tool, "inferd"), may_fail=True) for tool in ("userdel", "groupdel")]
    return [
        service.systemctl("disable", "--now", *reversed(UNITS), may_fail=True),
        *map(Remove, files),
        service.systemctl("daemon-reload"),
        service.systemctl("reset-failed", *UNITS, may_fail=True),
        *([*(Remove(service.under(path)) for path in data), *accounts] if purge else ()),
    ]


def run_steps(service: Service, steps: Sequence[Step]) -> None:
    """Run the steps in order; commands run only for this machine.

    :raises PermissionDenied: the caller must not write a file.
    :raises UnsupportedOperation: this machine does not have systemd.
    :raises BackendError: a step failed; the previous steps are done and can be repeated.
    """
    if service.root is None:
        _check_systemd(service)
    for step in steps:
        try:
            if service.root is None or not isinstance(step, Run):
                step.run()
        except PermissionError as exc:
            raise PermissionDenied(
                f"{exc.filename}: {exc.strerror}", hint="run it as root (sudo), or with --user"
            ) from None
        except OSError as exc:
            raise BackendError(
                f"{exc.filename}: {exc.strerror}", hint="correct this and run the command again"
            ) from None


def _check_systemd(service: Service) -> None:
    if not service.user and os.geteuid() != 0:
        raise PermissionDenied(
            "only root may install the system service", hint="use sudo, or --user"
        )
    if shutil.which("systemctl") is None:
        raise UnsupportedOperation(
            "systemctl was not found", hint="--root DIR writes the files for another machine"
        )

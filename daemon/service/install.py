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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from ...backends.errors import BackendError, InvalidArgument, PermissionDenied, UnsupportedOperation

SHIPPED = "/usr/local/bin/inferd"
"""The executable in `ExecStart=` of the shipped files."""
UNITS = ("inferd.service", "inferd.socket")
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


@dataclass(frozen=True)
class Remove:
    """Remove a folder, or a file and its drop-in folder if that is then empty."""

    path: Path

    @property
    def action(self) -> str:
        """The effect on the current file: remove, or gone if there is none."""
        return "remove" if os.path.lexists(self.path) else "gone"


@dataclass(frozen=True)
class Run:
    """Run a command; with *may_fail* a failure means that there was nothing to do."""

    command: tuple[str, ...]
    may_fail: bool = False
    action = "run"


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
    places = [start.split(" ")[0], os.path.realpath(sys.executable), sys.prefix, __file__]
    for place in (os.path.realpath(p) for p in places):
        if any(Path(place).is_relative_to(hidden) for hidden in HIDDEN):
            raise InvalidArgument(
                f"{place} is hidden from the service, as are all homes and temporary folders",
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
    folder = "user" if service.user else "system"
    steps: list[Step] = []
    if not service.user:
        steps += [_shipped(service, f"{kind}.d/inferd.conf") for kind in ("sysusers", "tmpfiles")]
        steps.append(Write(service.under(Path("/etc/inferd/config.toml")), CONFIG, keep=True))
    for name in UNITS:
        text = _text(f"{folder}/{name}").replace(SHIPPED, start)
        steps.append(Write(service.units / name, text))
    drop_in = service.units / "inferd.service.d" / "gpu.conf"
    if service.gpu:
        steps.append(Write(drop_in, _text("system/inferd.service.d/gpu.conf")))
    elif not service.user:
        steps.append(Remove(drop_in))
    if not service.user:
        steps.append(Run(("systemd-sysusers", "/etc/sysusers.d/inferd.conf")))
        steps.append(Run(("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/inferd.conf")))
    steps.append(service.systemctl("daemon-reload"))
    steps.append(service.systemctl("enable", "--now", "inferd.socket"))
    steps.append(service.systemctl("try-restart", "inferd.service"))
    return steps


def uninstall_plan(service: Service, *, purge: bool) -> list[Step]:
    """Return the steps that remove the service; with *purge* also its sessions and models."""
    steps: list[Step] = [service.systemctl("disable", "--now", *reversed(UNITS), may_fail=True)]
    steps += [Remove(service.units / name) for name in UNITS]
    if not service.user:
        steps.append(Remove(service.units / "inferd.service.d" / "gpu.conf"))
        kinds = ("sysusers", "tmpfiles")
        steps += [Remove(service.under(Path(f"/etc/{kind}.d/inferd.conf"))) for kind in kinds]
    steps.append(service.systemctl("daemon-reload"))
    steps.append(service.systemctl("reset-failed", *UNITS, may_fail=True))
    if purge:
        steps += [Remove(service.under(path)) for path in _data_folders(service)]
        if not service.user:
            # userdel leaves a group with other members.
            steps += [Run((tool, "inferd"), may_fail=True) for tool in ("userdel", "groupdel")]
    return steps


def _data_folders(service: Service) -> Sequence[Path]:
    if not service.user:
        return [Path(path) for path in ("/etc/inferd", "/var/lib/inferd", "/run/inferd")]
    return [
        platformdirs.user_config_path("inferd"),
        platformdirs.user_state_path("inferd"),
        platformdirs.user_data_path("inferd"),
    ]


def _shipped(service: Service, name: str) -> Write:
    return Write(service.under(Path("/etc") / name), _text(name))


def _text(name: str) -> str:
    return (importlib.resources.files("inferd") / "systemd" / name).read_text()


# Execution.


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
            _run_step(step, commands=service.root is None)
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


def _run_step(step: Step, *, commands: bool) -> None:
    match step:
        case Write() if step.action in ("write", "replace"):
            step.path.parent.mkdir(parents=True, exist_ok=True)
            new = step.path.with_name(f"{step.path.name}.new")
            new.write_text(step.text)
            new.chmod(0o644)
            new.replace(step.path)
        case Remove(path) if step.action == "remove":
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
                return
            path.unlink()
            if path.parent.suffix == ".d" and not any(path.parent.iterdir()):
                path.parent.rmdir()
        case Run() if commands:
            _run(step)


def _run(step: Run) -> None:
    text = " ".join(step.command)
    try:
        done = subprocess.run(
            step.command, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise BackendError(f"`{text}` took more than {COMMAND_S_MAX:g} s") from None
    if done.returncode and not step.may_fail:
        raise BackendError(
            f"`{text}` failed: {done.stderr.strip() or done.returncode}",
            hint="correct this and run the command again: completed steps stay",
        )

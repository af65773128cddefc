"""Installing the service: which files are written where, which commands run. Plan, then act.

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
"""What `ExecStart=` says in the files that ship."""
UNITS = ("inferd.service", "inferd.socket")
HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
"""What the machine's service does not see: `ProtectHome=` and `PrivateTmp=`."""
COMMAND_S_MAX = 120.0
CONFIG = """\
# inferd's configuration. `systemctl reload inferd` has it read again; with an error in it nothing
# changes, and `inferd status` says why. Models need no entry: put them into /var/lib/inferd/models.
[daemon]
# keep-alive-s = 1800

# [models.notes]
# file = "smollm2.gguf"
# temp = 0.2
"""
_PLAIN = re.compile(r"[A-Za-z0-9/._+@ -]+")


@dataclass(frozen=True)
class Write:
    """Write *text* to a file; one that is there already stays where *keep* is set."""

    path: Path
    text: str
    keep: bool = False

    @property
    def does(self) -> str:
        """What it does as things are: write, replace, keep, or nothing as it is the same."""
        if not self.path.exists():
            return "write"
        if self.keep:
            return "keep"
        return "same" if self.path.read_text(errors="replace") == self.text else "replace"


@dataclass(frozen=True)
class Remove:
    """Remove a file, and its folder with it if that is empty then; or a whole folder."""

    path: Path

    @property
    def does(self) -> str:
        """What it does as things are."""
        return "remove" if os.path.lexists(self.path) else "gone"


@dataclass(frozen=True)
class Run:
    """Run a command; one that *may_fail* has nothing to do where it does."""

    command: tuple[str, ...]
    may_fail: bool = False
    does = "run"


Step = Write | Remove | Run


@dataclass(frozen=True)
class Service:
    """Whose service it is: the machine's, or a user's. *root* is put before every path: then the
    files are for another machine, and no command runs.
    """

    user: bool = False
    gpu: bool = False
    root: Path | None = None

    @property
    def units(self) -> Path:
        """Where the units go."""
        if self.user:
            return self.under(platformdirs.user_config_path() / "systemd" / "user")
        return self.under(Path("/etc/systemd/system"))

    def under(self, path: Path) -> Path:
        """Return an absolute path below the root."""
        return path if self.root is None else self.root / path.relative_to("/")

    def systemctl(self, *arguments: str, may_fail: bool = False) -> Run:
        """Return a command for the manager of the service."""
        whose = ("--user",) if self.user else ()
        return Run(("systemctl", *whose, *arguments), may_fail)


def executable() -> str:
    """Return what starts this very inferd."""
    called = Path(sys.argv[0]).absolute()
    beside = Path(sys.executable).with_name("inferd")
    for path in (called, beside):
        if path.name == "inferd" and path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return f"{sys.executable} -m inferd"


def check_reachable(start: str) -> None:
    """Check that the machine's service can start this inferd.

    :raises InvalidArgument: it lies where the service does not see it.
    """
    places = [start.split(" ")[0], os.path.realpath(sys.executable), sys.prefix, __file__]
    for place in (os.path.realpath(p) for p in places):
        if any(Path(place).is_relative_to(hidden) for hidden in HIDDEN):
            raise InvalidArgument(
                f"the service does not see {place}: homes and temporary folders are hidden from it",
                hint="install inferd where all may read it, as in `python3 -m venv /opt/inferd`, or"
                " give --user",
            )


def install_plan(service: Service, start: str) -> list[Step]:
    """Return what installs the service that *start* starts.

    :raises InvalidArgument: that has characters that a unit gives another meaning.
    """
    if not _PLAIN.fullmatch(start):
        raise InvalidArgument(
            f"{start!r} cannot stand in a unit", hint="install inferd below a plain path"
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
    """Return what removes the service; with *purge* what it has kept, too: sessions, models."""
    steps: list[Step] = [service.systemctl("disable", "--now", *reversed(UNITS), may_fail=True)]
    steps += [Remove(service.units / name) for name in UNITS]
    if not service.user:
        steps.append(Remove(service.units / "inferd.service.d" / "gpu.conf"))
        kinds = ("sysusers", "tmpfiles")
        steps += [Remove(service.under(Path(f"/etc/{kind}.d/inferd.conf"))) for kind in kinds]
    steps.append(service.systemctl("daemon-reload"))
    steps.append(service.systemctl("reset-failed", *UNITS, may_fail=True))
    if purge:
        steps += [Remove(service.under(path)) for path in _kept(service)]
        if not service.user:
            # userdel leaves a group in which others are.
            steps += [Run((tool, "inferd"), may_fail=True) for tool in ("userdel", "groupdel")]
    return steps


def _kept(service: Service) -> Sequence[Path]:
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


# Doing it.


def do(service: Service, steps: Sequence[Step]) -> None:
    """Do the steps one by one; commands only for this machine.

    :raises PermissionDenied: the caller may not write there.
    :raises UnsupportedOperation: there is no systemd here.
    :raises BackendError: a step failed; those before are done, and may be done again.
    """
    if service.root is None:
        _check_here(service)
    for step in steps:
        try:
            _do(step, commands=service.root is None)
        except PermissionError as exc:
            raise PermissionDenied(
                f"{exc.filename}: {exc.strerror}", hint="as root (sudo), or with --user"
            ) from None
        except OSError as exc:
            raise BackendError(
                f"{exc.filename}: {exc.strerror}", hint="correct this and run it again"
            ) from None


def _check_here(service: Service) -> None:
    if not service.user and os.geteuid() != 0:
        raise PermissionDenied(
            "only root may install the machine's service", hint="sudo, or --user"
        )
    if shutil.which("systemctl") is None:
        raise UnsupportedOperation(
            "there is no systemctl here", hint="--root DIR writes the files for another machine"
        )


def _do(step: Step, *, commands: bool) -> None:
    match step:
        case Write() if step.does in ("write", "replace"):
            step.path.parent.mkdir(parents=True, exist_ok=True)
            new = step.path.with_name(f"{step.path.name}.new")
            new.write_text(step.text)
            new.chmod(0o644)
            new.replace(step.path)
        case Remove(path) if step.does == "remove":
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
            hint="correct this and run it again: what was done stays",
        )

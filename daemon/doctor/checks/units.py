"""The service: which units are installed for a daemon's socket, how they differ from those of this
inferd, whom it runs as and with which settings.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...service.install import Service, Write, executable, install_plan
from ..finding import Finding, fail, ok, warn
from .accounts import Account, account_of, own_account

UNIT = "inferd.service"
MANAGER_S_MAX = 2.0
_NO = ("no", "0", "false", "off", "")
_STATE = ("ActiveState", "Result", "NRestarts")


class Units(msgspec.Struct, frozen=True):
    """The installed service whose daemon is asked about."""

    user: bool
    """Whether it is a user's own, not the machine's."""
    directives: dict[str, list[str]]
    """Of the service with its drop-ins."""
    old: list[str]
    """Files that are others than this inferd would write."""
    start_missing: str = ""
    """What it starts, if that is not there."""
    account: Account | None = None
    """Who runs it; None: its user does not exist."""
    state: dict[str, str] = {}
    """What the manager says of it, where there is one."""

    @property
    def environment(self) -> dict[str, str]:
        """What the daemon's environment has from its units."""
        lines = self.directives.get("Environment", [])
        pairs = (word.partition("=") for line in lines for word in _words(line))
        return {name: value for name, equals, value in pairs if equals}

    @property
    def command(self) -> str:
        """Return `systemctl` for its manager."""
        return "systemctl --user" if self.user else "systemctl"


def _words(line: str) -> list[str]:
    """Return the words of a value; of one whose quotes do not end, those between blanks."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def look_at_units(
    socket: Path, environ: Mapping[str, str] = os.environ, root: Path | None = None
) -> Units | None:
    """Return the installed service that listens on *socket*, below *root* where there is one."""
    for user in (False, True):
        service = Service(user=user, root=root)
        if str(socket) in _sockets(service, environ):
            return _units(service)
    return None


def machine_socket(root: Path | None = None) -> Path | None:
    """Return the socket of the machine's service, if that is installed."""
    found = _sockets(Service(root=root), {})
    return Path(found[0]) if found else None


def _sockets(service: Service, environ: Mapping[str, str]) -> list[str]:
    runtime = environ.get("XDG_RUNTIME_DIR", "") if service.user else "/run"
    unit = service.units / "inferd.socket"
    streams = directives_of([unit]).get("ListenStream", [])
    return [stream.replace("%t", runtime) for stream in streams]


def _units(service: Service) -> Units:
    unit = service.units / UNIT
    found = directives_of([unit, *sorted((service.units / f"{UNIT}.d").glob("*.conf"))])
    start = (found.get("ExecStart") or [""])[-1].removesuffix(" serve")
    program = start.split(" ")[0]
    name = (found.get("User") or [""])[-1]
    return Units(
        user=service.user,
        directives=found,
        old=[str(w.path) for w in _writes(service, start) if w.action != "same"],
        start_missing="" if os.access(service.under(Path(program)), os.X_OK) else program,
        account=account_of(name) if name else own_account(),
        state={} if service.root else _state(service),
    )


def _writes(service: Service, start: str) -> list[Write]:
    plan = install_plan(service, start or executable())
    return [step for step in plan if isinstance(step, Write) and not step.keep]


def directives_of(units: list[Path]) -> dict[str, list[str]]:
    """Return the values of units that are there by their names, in their order."""
    found: dict[str, list[str]] = {}
    for unit in units:
        for line in unit.read_text(errors="replace").splitlines() if unit.exists() else ():
            name, equals, value = line.strip().partition("=")
            if equals and not name.startswith(("#", ";")):
                found.setdefault(name.strip(), []).append(value.strip())
    return found


def _state(service: Service) -> dict[str, str]:
    """Ask the manager, if one runs; what it does not say in time is not known."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return {}
    step = service.systemctl("show", UNIT, f"--property={','.join(_STATE)}")
    try:
        done = subprocess.run(
            step.command, capture_output=True, text=True, timeout=MANAGER_S_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        return {}
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def check_units(units: Units | None) -> Iterator[Finding]:
    """Check the service as it is installed."""
    if units is None:
        yield ok("service", "none is installed for this socket")
        return
    install = f"inferd install-service{' --user' if units.user else ''} --apply"
    log = f"journalctl {'--user ' if units.user else ''}-u inferd"
    if units.account is None:
        name = units.directives["User"][-1]
        yield fail("service", f"its user {name!r} does not exist", f"sudo {install}")
    if units.start_missing:
        yield fail("service", f"it starts {units.start_missing}, which cannot be run", install)
    if units.state.get("ActiveState") == "failed":
        yield fail(
            "service",
            f"it has failed ({units.state.get('Result')}), after {units.state.get('NRestarts')}"
            " restarts",
            f"{log} says why; `{units.command} reset-failed inferd` lets it start again",
        )
    if units.old:
        yield warn(
            "service",
            f"{', '.join(units.old)}: not as this inferd installs them",
            f"`{install}` brings them up to date; changes of your own belong into"
            f" `{units.command} edit inferd`",
        )
    if (units.directives.get("PrivateUsers") or ["no"])[-1].lower() not in _NO:
        yield fail(
            "service",
            "PrivateUsers= is on: the kernel gives all other users one number there, so the daemon"
            " serves none but its own",
            f"PrivateUsers=no in `{units.command} edit inferd`",
        )
    if units.account is not None and not (units.start_missing or units.old):
        whose = "your own" if units.user else f"the machine's, as the user {units.account.name}"
        yield ok("service", f"{whose}; its units are this inferd's")

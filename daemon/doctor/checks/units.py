"""The systemd service of a daemon's socket: its units, account, settings and state."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ...service.install import (
    BOOTED,
    Service,
    Write,
    directives_of,
    executable,
    install_plan,
    installed_service,
    sockets_of,
)
from ..finding import Finding, fail, ok, warn
from .accounts import Account, account_of, own_account

UNIT = "inferd.service"
MANAGER_S_MAX = 2.0
_NO = ("no", "0", "false", "off", "")
_STATE = ("ActiveState", "Result", "NRestarts")


class Units(msgspec.Struct, frozen=True):
    """The installed service of the examined daemon."""

    user: bool
    """Whether the units are those of a user's own service, not of the machine's."""
    directives: dict[str, list[str]]
    """The directives of the service and its drop-ins."""
    outdated: list[str]
    """Files that differ from those that this inferd would write."""
    missing_program: str = ""
    """The program that it starts, if that cannot be run."""
    account: Account | None = None
    """The account of the service; None if its user does not exist."""
    state: dict[str, str] = {}
    """Its properties, if a service manager runs."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment that the units set."""
        lines = self.directives.get("Environment", [])
        pairs = (word.partition("=") for line in lines for word in _words(line))
        return {name: value for name, equals, value in pairs if equals}

    @property
    def command(self) -> str:
        """The `systemctl` command for its manager."""
        return "systemctl --user" if self.user else "systemctl"


def _words(line: str) -> list[str]:
    """Return the words of a value; if a quote is not closed, split at blanks."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def find_units(
    socket: Path, environ: Mapping[str, str] = os.environ, root: Path | None = None
) -> Units | None:
    """Return the installed service that listens on *socket*; units are looked up below *root*."""
    service = installed_service(socket, environ, root)
    return None if service is None else _units(service)


def machine_socket(root: Path | None = None) -> Path | None:
    """Return the socket of the machine's service, or None if that is not installed."""
    found = sockets_of(Service(root=root), {})
    return Path(found[0]) if found else None


def _units(service: Service) -> Units:
    unit = service.units / UNIT
    found = directives_of([unit, *sorted((service.units / f"{UNIT}.d").glob("*.conf"))])
    start = (found.get("ExecStart") or [""])[-1].removesuffix(" serve")
    program = start.split(" ")[0]
    name = (found.get("User") or [""])[-1]
    return Units(
        user=service.user,
        directives=found,
        outdated=[
            str(step.path)
            for step in install_plan(service, start or executable())
            if isinstance(step, Write) and not step.keep and step.action != "same"
        ],
        missing_program="" if os.access(service.under(Path(program)), os.X_OK) else program,
        account=account_of(name) if name else own_account(),
        state={} if service.root else _state(service),
    )


def _state(service: Service) -> dict[str, str]:
    """Return the properties from the service manager; empty if none runs or replies in time."""
    if shutil.which("systemctl") is None or not BOOTED.is_dir():
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
    """Check the installed service."""
    if units is None:
        yield ok("none is installed for this socket")
        return
    install = f"inferd install-service{' --user' if units.user else ''} --apply"
    log = f"journalctl {'--user ' if units.user else ''}-u inferd"
    if units.account is None:
        name = units.directives["User"][-1]
        yield fail(f"its user {name!r} does not exist", f"sudo {install}")
    if units.missing_program:
        yield fail(f"it starts {units.missing_program}, which cannot be run", install)
    if units.state.get("ActiveState") == "failed":
        yield fail(
            f"it has failed ({units.state.get('Result')}), after {units.state.get('NRestarts')}"
            " restarts",
            f"`{log}` shows the cause; `{units.command} reset-failed inferd` lets it start again",
        )
    if units.outdated:
        yield warn(
            f"{', '.join(units.outdated)}: differ from the units that this inferd installs",
            f"`{install}` updates them; put your own changes into `{units.command} edit inferd`",
        )
    if (units.directives.get("PrivateUsers") or ["no"])[-1].lower() not in _NO:
        yield fail(
            "PrivateUsers= is on: all other users have the same uid there, so the daemon serves"
            " only its own user",
            f"PrivateUsers=no in `{units.command} edit inferd`",
        )
    if units.account is not None and not (units.missing_program or units.outdated):
        whose = "your own" if units.user else f"the machine's, as the user {units.account.name}"
        yield ok(f"{whose}; its units are up to date")

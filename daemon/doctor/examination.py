"""The examination: who is asked about, what is looked at, all findings in their order."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from ... import __version__
from ...ipc.paths import client_socket_path
from .checks.accounts import READ, Account, own_account
from .checks.configuration import Settings, check_settings, look_at_settings
from .checks.connection_check import REACH_S_MAX, Reach, check_daemon, check_socket, look_at_daemon
from .checks.engine_packages import (
    ENGINE_S_MAX,
    Engine,
    Installed,
    check_cpu,
    check_engine,
    check_installed,
    cpu_flags,
    look_at_engine,
    look_at_installed,
)
from .checks.folders import (
    Models,
    State,
    check_files,
    check_models,
    check_state,
    look_at_models,
    look_at_state,
)
from .checks.gpu import Gpus, check_gpus, look_at_gpus
from .checks.machine_limits import (
    Machine,
    check_cores,
    check_limits,
    check_memory,
    check_users,
    look_at_machine,
)
from .checks.units import Units, check_units, look_at_units, machine_socket
from .finding import Finding, ok, warn
from .time_limits import LOOK_S_MAX, Look, Unseen

T = TypeVar("T")
ENGINE_PACKAGE = "llama-cpp-python"
OTHER_VERSION = "use the command of the daemon's own version"
FILES_MAX = 100
"""Models whose headers are read."""


@dataclass
class Facts:
    """What was seen. None: it could not be looked at, or there is no reason to."""

    installed: Installed | None = None
    engine: Engine | None = None
    flags: frozenset[str] | None = None
    gpus: Gpus | None = None
    units: Units | None = None
    settings: Settings | None = None
    models: Models | None = None
    state: State | None = None
    reach: Reach | None = None
    machine: Machine | None = None


@dataclass
class Examination:
    """Facts, and what the checks made of them."""

    socket: Path
    facts: Facts = field(default_factory=Facts)
    environ: Mapping[str, str] = field(default_factory=dict)
    """What the daemon's settings are read from."""
    findings: list[Finding] = field(default_factory=list)

    def see(self, check: str, look: Look[T]) -> T | None:
        """Return what a look has seen; what it has not is a finding, too."""
        try:
            return look.facts()
        except Unseen as exc:
            remedy = "look as its owner or as root: `sudo inferd doctor`"
            self.findings.append(warn(check, f"cannot be looked at: {exc}", remedy))
            return None


def examine(
    socket: Path | None = None,
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Examination:
    """Look at everything, and check it. Takes as long as the slowest looks; each has a bound."""
    asked = Examination(_socket(socket, environ))
    seen = asked.facts
    seen.units = asked.see("service", Look(partial(look_at_units, asked.socket, environ)))
    asked.environ = environment_of(seen.units, environ)
    seen.settings = asked.see(
        "configuration", Look(partial(look_at_settings, config, asked.environ))
    )
    account = (seen.units and seen.units.account) or own_account()
    _look_side_by_side(asked, account)
    asked.findings += check_all(seen)
    return asked


def _socket(named: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the socket of the daemon that is asked about: where none is named and none is there,
    that of the machine's service, if it is installed.
    """
    found = named or client_socket_path(environ)
    # A folder that may not be searched has no socket for the caller: `Path.exists` would raise.
    if named is None and not environ.get("INFERD_SOCKET") and not os.path.exists(found):
        with contextlib.suppress(Unseen):
            return Look(machine_socket).facts() or found
    return found.absolute()


def environment_of(units: Units | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the daemon: a service has its units' settings, not the caller's."""
    if units is None:
        return dict(environ)
    own = {name: value for name, value in environ.items() if not name.startswith("INFERD_")}
    return own | units.environment


def _look_side_by_side(asked: Examination, account: Account) -> None:
    seen = asked.facts
    config = seen.settings.config if seen.settings is not None else None
    reach = Look(partial(look_at_daemon, asked.socket), REACH_S_MAX)
    gpus, installed, flags = Look(look_at_gpus), Look(look_at_installed), Look(cpu_flags)
    if config is not None:
        models = Look(partial(look_at_models, config, account))
        state = Look(partial(look_at_state, config, account))
        seen.models, seen.state = asked.see("models", models), asked.see("state", state)
    seen.installed = asked.see("packages", installed)
    if seen.installed is None or seen.installed.packages.get(ENGINE_PACKAGE, ""):
        look = partial(_look_at_engine, seen.models)
        seen.engine = asked.see("engine", Look(look, ENGINE_S_MAX + LOOK_S_MAX))
    seen.gpus, seen.flags = asked.see("gpu", gpus), asked.see("cpu", flags)
    seen.reach = asked.see("socket", reach)
    pid = seen.reach.stats.get("pid", 0) if seen.reach is not None else 0
    seen.machine = asked.see("memory", Look(partial(look_at_machine, pid)))


def _look_at_engine(models: Models | None) -> Engine:
    """Look at the engine, and at those models whose headers the caller can read."""
    files = models.files.values() if models is not None else ()
    return look_at_engine([file for file in files if os.access(file, READ)][:FILES_MAX])


# What is made of the facts.


def check_all(seen: Facts) -> list[Finding]:
    """Return all findings, those that others follow from first."""
    return [finding for check in _checks(seen) for finding in _made(check)]


def _made(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield a check's findings. A daemon of another version may tell what this one cannot read."""
    try:
        yield from check()
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        told = f"{type(exc).__name__}: {exc}"
        yield warn("inferd", f"a check does not understand what it sees: {told}", OTHER_VERSION)


def _checks(seen: Facts) -> Iterator[Callable[[], Iterator[Finding]]]:
    config = seen.settings.config if seen.settings is not None else None
    yield _check_software
    if seen.installed is not None:
        yield partial(check_installed, seen.installed)
    if seen.engine is not None:
        yield partial(check_engine, seen.engine)
        yield partial(check_cpu, seen.engine, seen.flags or frozenset())
    if seen.gpus is not None:
        yield partial(check_gpus, seen.gpus, seen.engine)
    if seen.settings is not None:
        yield partial(check_settings, seen.settings)
    if seen.models is not None:
        yield partial(check_models, seen.models)
    if seen.engine is not None:
        yield partial(check_files, seen.engine.files)
    if seen.state is not None:
        yield partial(check_state, seen.state)
    yield partial(check_units, seen.units)
    if seen.reach is not None:
        yield partial(check_socket, seen.reach)
        yield partial(check_daemon, seen.reach)
    if seen.machine is not None:
        loaded = seen.reach.stats.get("models", {}) if seen.reach is not None else {}
        yield partial(check_memory, seen.machine, seen.models, config, loaded)
        yield partial(check_limits, seen.machine, config)
        yield partial(check_cores, seen.machine, config)
        yield partial(check_users, seen.machine)


def _check_software() -> Iterator[Finding]:
    yield ok("inferd", f"{__version__}, Python {platform.python_version()} ({sys.executable})")

"""The examination: its probes, their facts, and all findings in order."""

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
from .checks.configuration import Settings, check_settings, read_settings_facts
from .checks.connection_check import (
    CONNECTION_S_MAX,
    Connection,
    check_daemon,
    check_socket,
    probe_daemon,
)
from .checks.engine_packages import (
    ENGINE_S_MAX,
    Engine,
    Installed,
    check_cpu,
    check_engine,
    check_installed,
    cpu_flags,
    find_packages,
    probe_engine,
)
from .checks.folders import (
    Models,
    State,
    check_files,
    check_models,
    check_state,
    inspect_models,
    inspect_state_folder,
)
from .checks.gpu import Gpus, check_gpus, find_gpus
from .checks.machine_limits import (
    Machine,
    check_cores,
    check_limits,
    check_memory,
    check_users,
    inspect_machine,
)
from .checks.units import Units, check_units, find_units, machine_socket
from .finding import Finding, ok, warn
from .time_limits import PROBE_S_MAX, Probe, ProbeFailed

T = TypeVar("T")
ENGINE_PACKAGE = "llama-cpp-python"
OTHER_VERSION = "use the command of the daemon's own version"
FILES_MAX = 100
"""Maximum number of models whose headers are read."""


@dataclass
class Facts:
    """Results of the probes; None if a probe failed or was not needed."""

    installed: Installed | None = None
    engine: Engine | None = None
    flags: frozenset[str] | None = None
    gpus: Gpus | None = None
    units: Units | None = None
    settings: Settings | None = None
    models: Models | None = None
    state: State | None = None
    connection: Connection | None = None
    machine: Machine | None = None


@dataclass
class Examination:
    """The facts and the findings of the checks."""

    socket: Path
    facts: Facts = field(default_factory=Facts)
    environ: Mapping[str, str] = field(default_factory=dict)
    """The environment from which the daemon reads its settings."""
    findings: list[Finding] = field(default_factory=list)

    def wait_for(self, check: str, probe: Probe[T]) -> T | None:
        """Return the result of a probe; add a finding if it failed."""
        try:
            return probe.wait_result()
        except ProbeFailed as exc:
            remedy = "run this as its owner or as root: `sudo inferd doctor`"
            self.findings.append(warn(check, f"cannot be examined: {exc}", remedy))
            return None


def examine(
    socket: Path | None = None,
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Examination:
    """Run all probes and checks. It takes as long as the slowest probes; each has a time limit."""
    examination = Examination(_socket(socket, environ))
    facts = examination.facts
    facts.units = examination.wait_for(
        "service", Probe(partial(find_units, examination.socket, environ))
    )
    examination.environ = environment_of(facts.units, environ)
    facts.settings = examination.wait_for(
        "configuration", Probe(partial(read_settings_facts, config, examination.environ))
    )
    account = (facts.units and facts.units.account) or own_account()
    _probe_concurrently(examination, account)
    examination.findings += check_all(facts)
    return examination


def _socket(named: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the socket of the examined daemon: the *named* one, or the default of clients.

    If no daemon has the default, it is the socket of the machine's service, if that is installed.
    """
    found = named or client_socket_path(environ)
    # Without permission to search the folder, `Path.exists` would raise.
    if named is None and not environ.get("INFERD_SOCKET") and not os.path.exists(found):
        with contextlib.suppress(ProbeFailed):
            return Probe(machine_socket).wait_result() or found
    return found.absolute()


def environment_of(units: Units | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's environment; for a service, settings come from its units alone."""
    if units is None:
        return dict(environ)
    own = {name: value for name, value in environ.items() if not name.startswith("INFERD_")}
    return own | units.environment


def _probe_concurrently(examination: Examination, account: Account) -> None:
    facts = examination.facts
    config = facts.settings.config if facts.settings is not None else None
    connection = Probe(partial(probe_daemon, examination.socket), CONNECTION_S_MAX)
    gpus, installed, flags = Probe(find_gpus), Probe(find_packages), Probe(cpu_flags)
    if config is not None:
        models = Probe(partial(inspect_models, config, account))
        state = Probe(partial(inspect_state_folder, config, account))
        facts.models, facts.state = (
            examination.wait_for("models", models),
            examination.wait_for("state", state),
        )
    facts.installed = examination.wait_for("packages", installed)
    if facts.installed is None or facts.installed.packages.get(ENGINE_PACKAGE, ""):
        probe = Probe(partial(_probe_engine, facts.models), ENGINE_S_MAX + PROBE_S_MAX)
        facts.engine = examination.wait_for("engine", probe)
    facts.gpus, facts.flags = examination.wait_for("gpu", gpus), examination.wait_for("cpu", flags)
    facts.connection = examination.wait_for("socket", connection)
    pid = facts.connection.stats.get("pid", 0) if facts.connection is not None else 0
    facts.machine = examination.wait_for("memory", Probe(partial(inspect_machine, pid)))


def _probe_engine(models: Models | None) -> Engine:
    """Probe the engine and the headers of the models that the caller can read."""
    files = models.files.values() if models is not None else ()
    return probe_engine([file for file in files if os.access(file, READ)][:FILES_MAX])


def check_all(facts: Facts) -> list[Finding]:
    """Return all findings, causes before their consequences."""
    return [finding for check in _checks(facts) for finding in _run_check(check)]


def _run_check(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check; a daemon of another version may send unknown data."""
    try:
        yield from check()
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        error = f"{type(exc).__name__}: {exc}"
        yield warn("inferd", f"a check cannot read its data: {error}", OTHER_VERSION)


def _checks(facts: Facts) -> Iterator[Callable[[], Iterator[Finding]]]:
    config = facts.settings.config if facts.settings is not None else None
    yield _check_software
    if facts.installed is not None:
        yield partial(check_installed, facts.installed)
    if facts.engine is not None:
        yield partial(check_engine, facts.engine)
        yield partial(check_cpu, facts.engine, facts.flags or frozenset())
    if facts.gpus is not None:
        yield partial(check_gpus, facts.gpus, facts.engine)
    if facts.settings is not None:
        yield partial(check_settings, facts.settings)
    if facts.models is not None:
        yield partial(check_models, facts.models)
    if facts.engine is not None:
        yield partial(check_files, facts.engine.files)
    if facts.state is not None:
        yield partial(check_state, facts.state)
    yield partial(check_units, facts.units)
    if facts.connection is not None:
        yield partial(check_socket, facts.connection)
        yield partial(check_daemon, facts.connection)
    if facts.machine is not None:
        loaded = facts.connection.stats.get("models", {}) if facts.connection is not None else {}
        yield partial(check_memory, facts.machine, facts.models, config, loaded)
        yield partial(check_limits, facts.machine, config)
        yield partial(check_cores, facts.machine, config)
        yield partial(check_users, facts.machine)


def _check_software() -> Iterator[Finding]:
    yield ok("inferd", f"{__version__}, Python {platform.python_version()} ({sys.executable})")

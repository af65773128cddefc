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
from typing import Any, TypeVar

import msgspec

from ... import __version__
from ...ipc.paths import client_socket_path
from ..config.settings import Config
from .checks import configuration, connection, engine_checks, folders, machine_limits, units
from .checks.accounts import READ, own_account
from .finding import Finding, ok, warn
from .time_limits import PROBE_S_MAX, Probe, ProbeFailed

T = TypeVar("T")
OTHER_VERSION = "use the command of the daemon's own version"
FILES_MAX = 100
"""Maximum number of models whose headers are read."""


@dataclass
class Facts:
    """Results of the probes; None if a probe failed or was not needed."""

    installed: engine_checks.Installed | None = None
    engine: engine_checks.EngineReport | None = None
    cpu_flags: frozenset[str] | None = None
    gpus: engine_checks.Gpus | None = None
    units: units.Units | None = None
    settings: configuration.Settings | None = None
    models: folders.Models | None = None
    state: folders.State | None = None
    tuned: configuration.TunedSettings | None = None
    connection: connection.ConnectionFacts | None = None
    machine: machine_limits.Machine | None = None

    @property
    def config(self) -> Config | None:
        """The configuration, without what is invalid in it."""
        return None if self.settings is None else self.settings.config

    @property
    def stats(self) -> dict[str, Any]:
        """The `stats` of the running daemon; empty if it did not return them."""
        return {} if self.connection is None else self.connection.stats


@dataclass
class Examination:
    """The facts and the findings of the checks."""

    socket: Path
    facts: Facts = field(default_factory=Facts)
    findings: list[Finding] = field(default_factory=list)

    def wait_for(self, check: str, probe: Probe[T]) -> T | None:
        """Return the result of a probe; add a finding if it failed."""
        try:
            return probe.wait_result()
        except ProbeFailed as exc:
            remedy = "run this as its owner or as root: `sudo inferd doctor`"
            finding = warn(f"cannot be examined: {exc}", remedy)
            self.findings.append(msgspec.structs.replace(finding, check=check))
            return None


def examine(
    socket: Path | None = None,
    config: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Examination:
    """Run all probes and checks. It takes as long as the slowest probes; each has a time limit."""
    examination = Examination(_socket(socket, environ))
    facts, wait_for = examination.facts, examination.wait_for
    facts.units = wait_for("service", Probe(partial(units.find_units, examination.socket, environ)))
    settings = partial(
        configuration.read_settings_facts, config, _daemon_environment(facts.units, environ)
    )
    facts.settings = wait_for("configuration", Probe(settings))
    _probe_concurrently(examination)
    examination.findings += check_all(facts)
    return examination


def _socket(named: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the socket of the examined daemon: the *named* one, or the default of clients.

    If the default does not exist, return the socket of the machine's service, if one is installed.
    """
    found = named or client_socket_path(environ)
    # Without permission to search the folder, `Path.exists` would raise.
    if named is None and not environ.get("INFERD_SOCKET") and not os.path.exists(found):
        with contextlib.suppress(ProbeFailed):
            return Probe(units.machine_socket).wait_result() or found
    return found.absolute()


def _daemon_environment(units: units.Units | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's environment; for a service, settings come from its units alone."""
    if units is None:
        return dict(environ)
    own = {name: value for name, value in environ.items() if not name.startswith("INFERD_")}
    return own | units.environment


def _probe_concurrently(examination: Examination) -> None:
    facts, config, wait_for = examination.facts, examination.facts.config, examination.wait_for
    account = (facts.units and facts.units.account) or own_account()
    daemon = Probe(
        partial(connection.probe_daemon, examination.socket),
        connection.CONNECTION_S_MAX,
    )
    gpus, installed = Probe(engine_checks.find_gpus), Probe(engine_checks.find_packages)
    cpu_flags = Probe(engine_checks.cpu_flags)
    if config is not None:
        models = Probe(partial(folders.inspect_models, config, account))
        state = Probe(partial(folders.inspect_state_folder, config, account))
        tuned = Probe(partial(configuration.inspect_tuned_settings, config))
        facts.models, facts.state = wait_for("models", models), wait_for("state", state)
        facts.tuned = wait_for("tuning", tuned)
    facts.installed = wait_for("packages", installed)
    if facts.installed is None or facts.installed.packages.get(engine_checks.PACKAGE, ""):
        seconds = engine_checks.ENGINE_S_MAX + PROBE_S_MAX
        facts.engine = wait_for("engine", Probe(partial(_probe_engine, facts.models), seconds))
    facts.gpus, facts.cpu_flags = wait_for("gpu", gpus), wait_for("cpu", cpu_flags)
    facts.connection = wait_for("socket", daemon)
    pid = facts.stats.get("pid", 0)
    facts.machine = wait_for("memory", Probe(partial(machine_limits.inspect_machine, pid)))


def _probe_engine(models: folders.Models | None) -> engine_checks.EngineReport:
    """Probe the engine and the headers of the models that the caller can read."""
    files = models.files.values() if models is not None else ()
    readable = [file for file in files if os.access(file, READ)]
    devices = models.devices if models is not None else {}
    return engine_checks.probe_engine(readable[:FILES_MAX], devices=devices)


def check_all(facts: Facts) -> list[Finding]:
    """Return all findings, causes before their consequences.

    Each check has a name and arguments; it is skipped if its first argument is None.
    """
    config, engine, loaded = facts.config, facts.engine, facts.stats.get("models", {})
    projectors = facts.models.projectors if facts.models is not None else {}
    checks: tuple[tuple[str, Callable[..., Iterator[Finding]], tuple[Any, ...]], ...] = (
        ("inferd", _check_software, ()),
        ("packages", engine_checks.check_installed, (facts.installed,)),
        ("engine", engine_checks.check_engine, (engine,)),
        ("cpu", engine_checks.check_cpu, (engine, facts.cpu_flags or frozenset())),
        ("gpu", engine_checks.check_gpus, (facts.gpus, engine)),
        ("media", engine_checks.check_media, (engine, projectors)),
        ("configuration", configuration.check_settings, (facts.settings,)),
        ("models", folders.check_models, (facts.models,)),
        ("models", folders.check_files, (engine and engine.files,)),
        ("state", folders.check_state, (facts.state,)),
        ("service", partial(units.check_units, facts.units), ()),
        ("socket", connection.check_socket, (facts.connection,)),
        ("daemon", connection.check_daemon, (facts.connection,)),
        ("memory", machine_limits.check_memory, (facts.machine, facts.models, config, loaded)),
        ("limits", machine_limits.check_limits, (facts.machine, config)),
        ("options", machine_limits.check_engine_options, (config, facts.machine)),
        ("tuning", configuration.check_tuned_settings, (facts.tuned,)),
        ("cores", machine_limits.check_cores, (facts.machine, config)),
        ("users", machine_limits.check_users, (facts.machine,)),
    )
    return [
        finding
        for name, check, arguments in checks
        if not arguments or arguments[0] is not None
        for finding in _run_check(name, partial(check, *arguments))
    ]


def _run_check(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check, or a warning if it cannot read its data, which a daemon of
    another version may have sent.
    """
    try:
        for finding in check():
            yield msgspec.structs.replace(finding, check=name)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        error = f"{type(exc).__name__}: {exc}"
        finding = warn(f"a check cannot read its data: {error}", OTHER_VERSION)
        yield msgspec.structs.replace(finding, check="inferd")


def _check_software() -> Iterator[Finding]:
    yield ok(f"{__version__}, Python {platform.python_version()} ({sys.executable})")

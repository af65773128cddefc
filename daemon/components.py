"""Optional components of the daemon: their health, the causes of failures, and remedies.

A failure is reported in the log, in `stats`, by `inferd status` and to systemd; the daemon
continues to serve.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import structlog

log = structlog.get_logger()


@dataclass(frozen=True)
class Component:
    """The effect of a component's failure, and the remedy."""

    missing: str
    remedy: str


COMPONENTS = {
    "config": Component(
        "the changed configuration file is not in force, the previous configuration is",
        "correct the file, and reload it (SIGHUP, `systemctl reload inferd`)",
    ),
    "state": Component(
        "the directory is not locked and starts are not counted: the clock is used instead",
        "let the daemon's user write to state-dir, or name another directory",
    ),
    "journal": Component(
        "sessions with an id are not stored on disk",
        "free space on the disk of state-dir, or let the daemon's user write there; pending data"
        " is then written",
    ),
    "states": Component(
        "named states are not stored on disk",
        "free space on the disk of state-dir, or let the daemon's user write there",
    ),
    "media": Component(
        "images and sounds of sessions are not kept when the daemon stops",
        "free space on the disk of state-dir, or let the daemon's user own its folder `media`",
    ),
    "jobs": Component(
        "jobs do not go on, and new ones are refused",
        "free space on the disk of state-dir, or let the daemon's user own its folder `jobs`; if"
        " its file has a newer version, start that version again",
    ),
    "kv-store": Component(
        "KV states are not kept on disk: they are computed again once evicted from memory",
        "free space on the disk of state-dir, or let the daemon's user own its folder `kv`",
    ),
    "models": Component(
        "swaps, pins and keep-alives made at run time are lost when the daemon stops",
        "free space on the disk of state-dir, or let the daemon's user write there; if the file"
        " has a newer version, start that version again, or move the file away",
    ),
    "models-dir": Component(
        "models added to the models directory or removed from it are not noticed",
        "let the daemon's user read models-dir, or name another directory",
    ),
    "model-files": Component(
        "models whose configured files do not exist cannot be loaded",
        "correct `file` in the configuration, or put the file there",
    ),
    "preload": Component(
        "models of `preload` were not loaded at the start; requests load them",
        "correct the cause, and load them by `inferd load NAME`",
    ),
    "memory": Component(
        "no memory is freed when memory becomes short while models run",
        "let the daemon read /proc/meminfo and its cgroup's files; restart it if they are readable",
    ),
    "cores": Component(
        "models use as many threads as there are cores, even when other programs need cores",
        "let the daemon read /proc/stat, and restart it",
    ),
    "notify": Component(
        "the service manager gets no status of the daemon",
        "set Type=notify and NotifyAccess=main in the unit, or no NOTIFY_SOCKET",
    ),
    "metrics": Component(
        "metrics are not served",
        "free the address, or set `metrics` to another port, a path or off; the daemon retries",
    ),
    "traces": Component(
        "spans of requests are not exported, or only a part of them",
        "start the collector, or set `traces` to another address or off; later spans are then sent",
    ),
    "log": Component(
        "events are not in log-file, but in standard error",
        "free space on its disk or create its folder, and let the daemon's user write there; each"
        " event retries",
    ),
    "uvloop": Component(
        "the event loop is asyncio's, which needs more time for each token",
        "install uvloop again, or remove it",
    ),
}
"""All components. A remedy that depends on the cause is passed to `note`."""


@dataclass(frozen=True)
class _Failure(Component):
    cause: str
    since: float


class Components:
    """Health of the components. Owned by the event loop; before that runs, by the main thread."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self.on_change: Callable[[str], None] = lambda _: None
        """Called with the name of a component that fails or works again."""
        self._seconds = seconds
        self._failures: dict[str, _Failure] = {}

    def note(self, name: str, cause: str | None, *, missing: str = "", remedy: str = "") -> None:
        """Store the cause of a component's failure; None means that it works. *missing* and
        *remedy* replace those in `COMPONENTS`.
        """
        before = self._failures.get(name)
        if cause is None:
            if before is not None:
                del self._failures[name]
                log.info("component.recovered", component=name)
                self.on_change(name)
            return
        component = COMPONENTS[name]
        self._failures[name] = failure = _Failure(
            missing or component.missing,
            remedy or component.remedy,
            " ".join(cause.split()) or "unknown",
            before.since if before is not None else self._seconds(),
        )
        if before is None or before.missing != failure.missing:
            log.error(
                "component.failing", component=name, cause=failure.cause, remedy=failure.remedy
            )
            self.on_change(name)

    async def run_component(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a component's *work*; an unexpected failure ends only that component."""
        try:
            await work()
        except Exception as exc:
            log.exception("component.failed", component=name)
            self.note(name, repr(exc))

    @property
    def line(self) -> str:
        """One line of status for systemd."""
        failing = ", ".join(f"{n} ({f.cause})" for n, f in sorted(self._failures.items()))
        return f"serving; degraded: {failing}" if failing else "serving"

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each component, for `stats`."""
        return [
            {
                "component": name,
                "up": failure is None,
                "cause": failure and failure.cause,
                "effect": failure and failure.missing,
                "remedy": failure and failure.remedy,
                "failing_s": failure and self._seconds() - failure.since,
            }
            for name, failure in ((name, self._failures.get(name)) for name in COMPONENTS)
        ]

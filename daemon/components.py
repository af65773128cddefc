"""Optional components of the daemon: their health, the causes of failures, and remedies.

A component that fails, at the start or later, is reported in the log, in `stats`, by `inferd
status` and to systemd; the daemon continues to serve.
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
        "what the configuration file says now does not hold, but what it said before",
        "correct the file, and have it read again (SIGHUP, `systemctl reload inferd`)",
    ),
    "state": Component(
        "starts are not counted: the clock stands in",
        "let the daemon's user write to state-dir, or name another directory",
    ),
    "journal": Component(
        "sessions with an id are not written down",
        "make room on the disk of state-dir, or let the daemon's user write there; what waits is"
        " then written by itself",
    ),
    "kv-store": Component(
        "KV states are not kept on disk: they are computed again when memory has no room for them",
        "make room on the disk of state-dir, or let the daemon's user own its folder `kv`",
    ),
    "models": Component(
        "swaps, pins and keep-alives said at run time end with the daemon",
        "make room on the disk of state-dir, or let the daemon's user write there; where the file"
        " is of a newer version, start that one again, or move the file away",
    ),
    "models-dir": Component(
        "models that come into the models directory, or leave it, are not noticed",
        "let the daemon's user read models-dir, or name another directory",
    ),
    "memory": Component(
        "memory that falls short while models run is not given back",
        "let the daemon read /proc/meminfo and its cgroup's files, and start it again if they can"
        " be read",
    ),
    "cores": Component(
        "as many threads compute as there are cores for them, also beside other busy programs",
        "let the daemon read /proc/stat, and start it again",
    ),
    "notify": Component(
        "the service manager is not told how the daemon is",
        "Type=notify and NotifyAccess=main in the unit, or no NOTIFY_SOCKET",
    ),
    "metrics": Component(
        "the figures are not served: nobody can scrape them",
        "free the address, or set `metrics` to another port, a path or off; it is tried again by"
        " itself",
    ),
    "traces": Component(
        "spans of requests are not told, or not all of them",
        "start the collector, or set `traces` to another address or off; what comes then is sent by"
        " itself",
    ),
    "log": Component(
        "events are not in log-file, but in standard error",
        "make room on its disk, or its folder again, and let the daemon's user write there; each"
        " event tries anew",
    ),
    "uvloop": Component(
        "the event loop is asyncio's, which needs more time for each token",
        "install uvloop again, or remove it",
    ),
}
"""All components. A remedy that depends on the cause is passed to `note`."""


@dataclass(frozen=True)
class _Failure:
    cause: str
    missing: str
    remedy: str
    since: float


class Components:
    """Owned by the daemon's event loop; before that runs, by the thread that starts it."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic):
        self.on_change: Callable[[str], None] = lambda _: None
        """Called with the name of a component that fails, or works again."""
        self._seconds = seconds
        self._failures: dict[str, _Failure] = {}

    def note(self, name: str, cause: str | None, *, missing: str = "", remedy: str = "") -> None:
        """Note why a component fails now, or with None that it works. *missing* and *remedy*
        replace the usual ones.
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
            " ".join(cause.split()) or "unknown",
            missing or component.missing,
            remedy or component.remedy,
            before.since if before is not None else self._seconds(),
        )
        if before is None or before.missing != failure.missing:
            log.error(
                "component.failing", component=name, cause=failure.cause, remedy=failure.remedy
            )
            self.on_change(name)

    async def while_it_works(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run a component's *work*; an unexpected failure ends that component alone."""
        try:
            await work()
        except Exception as exc:
            log.exception("component.failed", component=name)
            self.note(name, repr(exc))

    @property
    def line(self) -> str:
        """The daemon's state in one line, for systemd."""
        failing = ", ".join(f"{n} ({f.cause})" for n, f in sorted(self._failures.items()))
        return f"serving; degraded: {failing}" if failing else "serving"

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of each component, for `stats`."""
        return [self._described(name, self._failures.get(name)) for name in COMPONENTS]

    def _described(self, name: str, failure: _Failure | None) -> dict[str, Any]:
        return {
            "component": name,
            "up": failure is None,
            "cause": failure and failure.cause,
            "effect": failure and failure.missing,
            "remedy": failure and failure.remedy,
            "for_s": failure and self._seconds() - failure.since,
        }

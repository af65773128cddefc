"""Notifications to the service manager (systemd): readiness, status, requests of time, watchdog.

Lives on the daemon's event loop. Without a manager nothing is sent and no timer runs.

The watchdog is fed while the event loop runs and no worker is overdue. The daemon itself replaces a
hung worker (`worker-hang-timeout-s`, 120 s), which pauses only that worker's turns; a restart by
the manager would interrupt the turns of all models. So the watchdog is withheld only where the
replacement failed, that is, while a worker that should have been killed still has its work. A load
without progress does not withhold it, since its callers can cancel it and all others are served.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from enum import Enum

import anyio
import structlog

from ..components import Components
from ..printable import escape_controls

STATUS_BYTES_MAX = 1000
"""systemd drops a message of more than 4096 bytes."""
LOADING_NAMED_MAX = 3
"""Models that a status names; the rest is a number."""
EXTEND_S = 30.0
"""The time requested every `EXTEND_EVERY_S` during a start, a shutdown or a load."""
EXTEND_EVERY_S = 5.0
PROGRESS_INTERVAL_S = 1.0
"""The interval of notifications about a load's progress."""
START_S_MAX = 600.0
"""The time after which a start requests no more time; then the unit's limit applies."""
END_S_MAX = 30.0
"""The time of a shutdown besides the turns' grace: answers, the journal, unloading."""

log = structlog.get_logger()


class Phase(Enum):
    """The phase of the daemon's life."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


def notify(state: str) -> str | None:
    """Send *state*, such as ``READY=1``, in one datagram to `$NOTIFY_SOCKET` (sd_notify); return
    the cause of a failure.
    """
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return None
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)  # a manager that does not read must not block the daemon
            sock.sendto(state.encode(), address)
    except OSError as exc:
        return f"{path}: {exc.strerror or exc}"
    return None


def status_line(head: str, loading: Mapping[str, float]) -> str:
    """Return *head* with the loading models after its state, cut to `STATUS_BYTES_MAX`."""
    named = [f"{name} {part:.0%}" for name, part in sorted(loading.items())[:LOADING_NAMED_MAX]]
    if len(loading) > LOADING_NAMED_MAX:
        named.append(f"and {len(loading) - LOADING_NAMED_MAX} more")
    state, semicolon, rest = head.partition("; ")
    line = f"{state}; loading: {', '.join(named)}{semicolon}{rest}" if named else head
    data = escape_controls(" ".join(line.split())).encode()
    if len(data) <= STATUS_BYTES_MAX:
        return data.decode()
    return data[: STATUS_BYTES_MAX - 3].decode(errors="ignore") + "…"


def feed_interval_s(environ: Mapping[str, str], pid: int | None = None) -> float | None:
    """Return the seconds between two feedings, half of the watchdog's interval
    (`sd_watchdog_enabled(3)`); None without a watchdog, or for that of another process.
    """
    interval, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or not int(interval):
        return None
    if owner and owner != str(os.getpid() if pid is None else pid):
        return None
    return int(interval) / 1e6 / 2


class ServiceNotifier:
    """Notifies the manager of changes. *loading* returns the loading models with their progress,
    *overdue* the models for whose workers the watchdog is not fed, *turns* the number of running
    turns, *pending_restart* the settings that wait for a restart.
    """

    def __init__(
        self,
        components: Components,
        *,
        loading: Callable[[], Mapping[str, float]] = dict,
        overdue: Callable[[], list[str]] = list,
        turns: Callable[[], int] = lambda: 0,
        pending_restart: Callable[[], list[str]] = list,
        environ: Mapping[str, str] = os.environ,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self.managed = bool(environ.get("NOTIFY_SOCKET"))
        self._components, self._loading = components, loading
        self._overdue, self._turns = overdue, turns
        self._pending_restart = pending_restart
        self._feed_s = feed_interval_s(environ)
        self._seconds = seconds
        self._phase, self._until = Phase.STARTING, seconds() + START_S_MAX
        self._changed = anyio.Event()
        self._unsent: dict[str, str] = {}
        """Notifications that the manager has not accepted yet."""
        self._failed = False
        self._status = ""
        self._fed_at = self._extended_at = float("-inf")
        self._withheld: list[str] = []

    def notify_soon(self) -> None:
        """Notify the manager of changes soon."""
        self._changed.set()

    def component_changed(self, name: str) -> None:
        """Notify the manager that a component fails or works again."""
        if name != "notify":  # otherwise each failed notification would cause another
            self.notify_soon()

    def notify_ready(self) -> None:
        """Notify that the socket answers, unless the daemon is already shutting down."""
        if self._phase is Phase.STOPPING:
            return
        self._phase = Phase.SERVING
        self._notify({"READY": "1"})
        self._extended_at = float("-inf")

    def notify_reloading(self) -> None:
        """Notify that a reload has begun; `notify_ready` ends it."""
        # Without the time, systemd would wait for another notification until its own limit.
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify({"RELOADING": "1", "MONOTONIC_USEC": str(now_us)})

    def notify_stopping(self, grace_s: float) -> None:
        """Notify that the daemon shuts down, within *grace_s* for the turns and `END_S_MAX`."""
        self._phase, self._until = Phase.STOPPING, self._seconds() + grace_s + END_S_MAX
        self._extended_at = float("-inf")
        self._notify({"STOPPING": "1"})

    async def run(self) -> None:
        """Notify of changes, request time and feed the watchdog, until cancelled."""
        while self.managed:
            self._changed = anyio.Event()
            self._notify({})
            with anyio.move_on_after(self._idle_s()):
                await self._changed.wait()

    def _notify(self, news: dict[str, str]) -> None:
        """Send *news* and everything else that is due, in one message."""
        if not self.managed:
            return
        if "READY" in news:
            self._unsent = {}  # a reload has ended
        self._unsent = self._unsent | news
        message = dict(self._unsent)
        status = status_line(self._status_head(), self._loading())
        if status != self._status:
            message["STATUS"] = status
        now = self._seconds()
        if self._feed_s is not None and now >= self._fed_at + self._feed_s and self._can_feed():
            message["WATCHDOG"] = "1"
        if extend_s := self._extend_s(now, fed="WATCHDOG" in message):
            message["EXTEND_TIMEOUT_USEC"] = str(round(extend_s * 1e6))
        if message:
            self._send(message, status, now)

    def _send(self, message: Mapping[str, str], status: str, now: float) -> None:
        failure = notify("\n".join(f"{key}={value}" for key, value in message.items()))
        self._components.note("notify", failure)
        if failure is not None:
            self._failed = True
            return
        self._unsent, self._status = {}, status
        if self._failed:  # the status that was just sent still names the failure
            self._failed = False
            self.notify_soon()
        if "EXTEND_TIMEOUT_USEC" in message:
            self._extended_at = now
        if "WATCHDOG" in message:
            self._fed_at = now

    def _status_head(self) -> str:
        if self._phase is Phase.STARTING:
            return "starting: restoring the state of earlier daemons"
        if self._phase is Phase.STOPPING:
            return f"shutting down; running turns: {self._turns()}"
        line = self._components.line
        if self._withheld:
            line += f"; cannot be replaced: {', '.join(self._withheld[:LOADING_NAMED_MAX])}"
        if pending := self._pending_restart():
            line += f"; restart for: {', '.join(pending)}"
        return line

    def _extend_s(self, now: float, *, fed: bool) -> float:
        """Return the time to request now, for a start, a shutdown or a load.

        Requested time also postpones the watchdog. So while the daemon serves, it requests at most
        the watchdog's own interval, and only when it feeds the watchdog. A daemon that hangs during
        a load is thus detected as soon as any other.
        """
        if self._phase is Phase.SERVING and self._feed_s is not None:
            return 2 * self._feed_s if fed and self._loading() else 0.0
        due = now >= self._extended_at + EXTEND_EVERY_S
        return EXTEND_S if due and self._needs_time(now) else 0.0

    def _needs_time(self, now: float) -> bool:
        if self._phase is Phase.SERVING:
            return bool(self._loading())
        return now < self._until

    def _can_feed(self) -> bool:
        """Return whether no worker is overdue. The event loop is not hung, since it runs this."""
        overdue = self._overdue()
        if overdue and overdue != self._withheld:
            log.error("watchdog.withheld", models=overdue)
        self._withheld = overdue
        return not overdue

    def _idle_s(self) -> float:
        """Return the time until the next notification that is due without a call."""
        now = self._seconds()
        ends = [PROGRESS_INTERVAL_S] if self._needs_time(now) else []
        if self._failed:
            ends.append(EXTEND_EVERY_S)
        if self._feed_s is not None:
            ends.append(
                max(self._fed_at + self._feed_s - now, 0.0)
                or min(PROGRESS_INTERVAL_S, self._feed_s)
            )
        return min(ends, default=float("inf"))

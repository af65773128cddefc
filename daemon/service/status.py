"""Notifications to the service manager (systemd): readiness, status, need of time, watchdog.

Lives on the daemon's event loop. Without a manager nothing is sent and nothing wakes up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from enum import Enum

import anyio
import structlog

from ..components import Components
from .notify import notify
from .watchdog import feed_s

STATUS_BYTES_MAX = 1000
"""systemd drops a message of more than 4096 bytes."""
LOADING_NAMED_MAX = 3
"""Models that a status names; of others it has the number."""
EXTEND_S = 30.0
"""The time that is requested again and again while a start, an end or a load goes on."""
EXTEND_EVERY_S = 5.0
PROGRESS_INTERVAL_S = 1.0
"""The interval of notifications about a load's progress."""
START_S_MAX = 600.0
"""A start that takes longer gets no more time from here on: the unit's own limit holds."""
END_S_MAX = 30.0
"""The time that the end takes beside the turns' grace: answers, the journal, unloading."""

log = structlog.get_logger()


class Phase(Enum):
    """Where the daemon is between its start and its end."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


def status_line(head: str, loading: Mapping[str, float]) -> str:
    """Return one line of `STATUS_BYTES_MAX` at most: what loads, then *head*'s rest."""
    named = [f"{name} {part:.0%}" for name, part in sorted(loading.items())[:LOADING_NAMED_MAX]]
    if len(loading) > LOADING_NAMED_MAX:
        named.append(f"and {len(loading) - LOADING_NAMED_MAX} more")
    state, semicolon, rest = head.partition("; ")
    line = f"{state}; loading: {', '.join(named)}{semicolon}{rest}" if named else head
    data = " ".join(line.split()).encode()
    if len(data) <= STATUS_BYTES_MAX:
        return data.decode()
    return data[: STATUS_BYTES_MAX - 3].decode(errors="ignore") + "…"


class ServiceNotifier:
    """Notifies the manager of changes. *loading* are the models that load and how far each is,
    *overdue* those for whose workers the watchdog is not fed, *turns* how many run, *restart_for*
    the settings that wait for a restart.
    """

    def __init__(
        self,
        parts: Components,
        *,
        loading: Callable[[], Mapping[str, float]] = dict,
        overdue: Callable[[], list[str]] = list,
        turns: Callable[[], int] = lambda: 0,
        restart_for: Callable[[], list[str]] = list,
        environ: Mapping[str, str] = os.environ,
        seconds: Callable[[], float] = time.monotonic,
    ):
        self.managed = bool(environ.get("NOTIFY_SOCKET"))
        self._parts, self._loading, self._overdue, self._turns = parts, loading, overdue, turns
        self._restart_for = restart_for
        self._feed_s = feed_s(environ)
        self._seconds = seconds
        self._phase, self._until = Phase.STARTING, seconds() + START_S_MAX
        self._changed = anyio.Event()
        self._owed: dict[str, str] = {}
        """Notifications that the manager did not take."""
        self._failed = False
        self._status = ""
        self._fed_at = self._extended_at = float("-inf")
        self._withheld: list[str] = []

    def notify_soon(self) -> None:
        """Notify the manager of what has changed, soon."""
        self._changed.set()

    def component_changed(self, name: str) -> None:
        """Notify the manager that a component fails or works again."""
        if name != "notify":  # it would cause its own notification for ever
            self.notify_soon()

    def notify_ready(self) -> None:
        """Notify that the socket answers, unless the daemon ends already."""
        if self._phase is Phase.STOPPING:
            return
        self._phase = Phase.SERVING
        self._notify({"READY": "1"})
        self._extended_at = float("-inf")

    def notify_reloading(self) -> None:
        """Notify that a reload has begun; `notify_ready` ends it."""
        # Without its time systemd waits for another one until its own limit.
        began = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify({"RELOADING": "1", "MONOTONIC_USEC": str(began)})

    def notify_stopping(self, grace_s: float) -> None:
        """Notify that the daemon ends, within *grace_s* for the turns and a little more."""
        self._phase, self._until = Phase.STOPPING, self._seconds() + grace_s + END_S_MAX
        self._extended_at = float("-inf")
        self._notify({"STOPPING": "1"})

    async def run(self) -> None:
        """Notify of changes, request time and feed the watchdog, until cancelled."""
        while self.managed:
            self._changed = anyio.Event()
            self._notify({})
            with anyio.move_on_after(self._rest_s()):
                await self._changed.wait()

    def _notify(self, news: dict[str, str]) -> None:
        """Send *news* and what else is due, in one message."""
        if not self.managed:
            return
        if "READY" in news:
            self._owed = {}  # a reload that is over
        self._owed = self._owed | news
        message = dict(self._owed)
        status = status_line(self._head(), self._loading())
        if status != self._status:
            message["STATUS"] = status
        now = self._seconds()
        if self._feed_s is not None and now >= self._fed_at + self._feed_s and self._moves():
            message["WATCHDOG"] = "1"
        if extend_s := self._extend_s(now, fed="WATCHDOG" in message):
            message["EXTEND_TIMEOUT_USEC"] = str(round(extend_s * 1e6))
        if message:
            self._send(message, status, now)

    def _send(self, message: Mapping[str, str], status: str, now: float) -> None:
        failure = notify("\n".join(f"{key}={value}" for key, value in message.items()))
        self._parts.note("notify", failure)
        if failure is not None:
            self._failed = True
            return
        self._owed, self._status = {}, status
        if self._failed:  # the status said so
            self._failed = False
            self.notify_soon()
        if "EXTEND_TIMEOUT_USEC" in message:
            self._extended_at = now
        if "WATCHDOG" in message:
            self._fed_at = now

    def _head(self) -> str:
        if self._phase is Phase.STARTING:
            return "starting: reading what earlier daemons have kept"
        if self._phase is Phase.STOPPING:
            return f"finishing what runs; turns: {self._turns()}"
        line = self._parts.line
        if self._withheld:
            line += f"; cannot be replaced: {', '.join(self._withheld[:LOADING_NAMED_MAX])}"
        if waiting := self._restart_for():
            line += f"; restart for: {', '.join(waiting)}"
        return line

    def _extend_s(self, now: float, *, fed: bool) -> float:
        """Return how much time to request now; the start, the end and loads take it.

        Requested time also postpones the watchdog: while the daemon serves, no more than the
        watchdog gives, and only where it is fed. So a daemon that hangs beside a load is seen no
        later than another.
        """
        if self._phase is Phase.SERVING and self._feed_s is not None:
            return 2 * self._feed_s if fed and self._loading() else 0.0
        due = now >= self._extended_at + EXTEND_EVERY_S
        return EXTEND_S if due and self._takes_time(now) else 0.0

    def _takes_time(self, now: float) -> bool:
        if self._phase is Phase.SERVING:
            return bool(self._loading())
        return now < self._until

    def _moves(self) -> bool:
        """Return whether every worker with work makes progress; the loop runs this, so it does."""
        stuck = self._overdue()
        if stuck and stuck != self._withheld:
            log.error("watchdog.withheld", models=stuck)
        self._withheld = stuck
        return not stuck

    def _rest_s(self) -> float:
        """Return after how long a notification may be due that no call announces."""
        now = self._seconds()
        ends = [PROGRESS_INTERVAL_S] if self._takes_time(now) else []
        if self._failed:
            ends.append(EXTEND_EVERY_S)
        if self._feed_s is not None:
            ends.append(
                max(self._fed_at + self._feed_s - now, 0.0)
                or min(PROGRESS_INTERVAL_S, self._feed_s)
            )
        return min(ends, default=float("inf"))

"""The service manager's watchdog: whether it is on, how often it is fed, and when it is not.

It is fed while the event loop turns and every worker with work moves, or is still within the time
in which the daemon itself replaces it. A worker that hangs (`worker-hang-timeout-s`) costs its own
turns a pause; the manager's remedy, a new daemon, would interrupt those of all models. So it
comes only where the daemon's own has failed: the worker should have been killed, and is still there
with its work. A load that does not move is not a reason either: its callers
may cancel it, and all others are served.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol


class Watched(Protocol):
    """A worker, as far as the watchdog sees it."""

    @property
    def overdue(self) -> bool:
        """Whether it is silent over its work past the time within which it is replaced."""


def feed_s(environ: Mapping[str, str], pid: int | None = None) -> float | None:
    """Return after how many seconds the watchdog is to be fed again, half of what it waits
    (`sd_watchdog_enabled(3)`); None: there is none, or it is another process's.
    """
    interval, whose = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or not int(interval):
        return None
    if whose and whose != str(os.getpid() if pid is None else pid):
        return None
    return int(interval) / 1e6 / 2


def overdue(workers: Iterable[tuple[str, Watched]]) -> list[str]:
    """Return the models whose workers should have been replaced by now: while there is one, the
    watchdog is not fed.
    """
    return [name for name, worker in workers if worker.overdue]

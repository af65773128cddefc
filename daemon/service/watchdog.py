"""The service manager's watchdog: its interval, and the workers for which it is not fed.

The watchdog is fed while the event loop runs and no worker is overdue. The daemon itself replaces a
hung worker (`worker-hang-timeout-s`, 120 s), which pauses only that worker's turns; a restart by
the manager would interrupt the turns of all models. So the watchdog is withheld only where the
replacement failed: the worker should have been killed and still has its work. A load without
progress does not withhold it: its callers can cancel it, and all others are served.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Protocol


class Watched(Protocol):
    """The part of a worker that the watchdog uses."""

    @property
    def overdue(self) -> bool:
        """Whether the worker makes no progress past the time within which it is replaced."""


def feed_interval_s(environ: Mapping[str, str], pid: int | None = None) -> float | None:
    """Return the seconds between two feedings, half of the watchdog's (`sd_watchdog_enabled(3)`);
    None without a watchdog, or for that of another process.
    """
    interval, owner = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not interval.isdecimal() or not int(interval):
        return None
    if owner and owner != str(os.getpid() if pid is None else pid):
        return None
    return int(interval) / 1e6 / 2


def overdue(workers: Iterable[tuple[str, Watched]]) -> list[str]:
    """Return the models whose workers are overdue; while there are any, the watchdog is not fed."""
    return [name for name, worker in workers if worker.overdue]

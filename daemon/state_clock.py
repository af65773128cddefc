"""The date by which stored sessions age. It advances only by time that can have passed.

It continues from a note in the state directory. While the machine has not been booted anew, the
time since the note is known from the time since boot, whatever the clock shows. Otherwise the clock
has the time for which the machine was off, unless it went back or leapt ahead by more than
`OFF_S_MAX`: then sessions do not age by that time, and remain for the rest of their days.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
import structlog

from ..sessions import Dates
from .state_files import replace_file

CLOCK_FILE = "clock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
OFF_S_MAX = 30 * 86_400.0
"""A machine that seems to have been off for longer has a wrong clock, or sessions that can wait."""
SET_S_MAX = 3600.0
"""A clock that is corrected by less causes no warning."""
NOTE_EVERY_S = 3600.0
_BYTES_MAX = 4096

log = structlog.get_logger()


class Moment(msgspec.Struct, frozen=True):
    """The machine's clock, *wall*, at a time since a boot."""

    boot: str
    elapsed_s: float
    wall: float


class Note(msgspec.Struct, frozen=True):
    """The date at a moment."""

    moment: Moment
    date: float


class Advance(NamedTuple):
    """The date now, and the time in seconds by which the clock leapt ahead of it."""

    date: float
    leap_s: float = 0.0


def advance(last: Note | None, now: Moment) -> Advance:
    """Return the date at the moment *now* after the last note."""
    if last is None:
        return Advance(now.wall)
    before = last.moment
    by_clock = now.wall - before.wall
    if now.boot and now.boot == before.boot and now.elapsed_s >= before.elapsed_s:
        passed = now.elapsed_s - before.elapsed_s
        leap = by_clock - passed
        return Advance(last.date + passed, leap if leap > SET_S_MAX else 0.0)
    off = by_clock - now.elapsed_s
    if off > OFF_S_MAX:
        return Advance(last.date + now.elapsed_s, off)
    return Advance(last.date + max(by_clock, now.elapsed_s))


def moment() -> Moment:
    """Return the present moment."""
    try:
        boot = BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return Moment(boot, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class StateClock:
    """The clock of one daemon. Without a readable note, the date is that of the machine."""

    def __init__(self, state: Path, now: Moment | None = None):
        self._path = state / CLOCK_FILE
        self._began = now or moment()
        self._date, self._leap_s = advance(self._read(), self._began)
        self._failed = False

    def dates(self) -> Dates:
        """Return the dates of a journal."""
        passed = time.clock_gettime(time.CLOCK_BOOTTIME) - self._began.elapsed_s
        return Dates(lambda: self._date + passed)

    def log_leap(self, sessions: int) -> None:
        """Log that the clock leapt ahead, by which the *sessions* do not age."""
        if self._leap_s:
            log.warning("clock.leapt", days=round(self._leap_s / 86_400, 1), sessions_kept=sessions)

    async def run(self) -> None:
        """Note the date now and every hour, until cancelled."""
        while True:
            await self.note()
            await anyio.sleep(NOTE_EVERY_S)

    async def note(self) -> None:
        """Note the date now. After a failure, a later start counts from an earlier note."""
        now = moment()
        note = Note(now, self._date + now.elapsed_s - self._began.elapsed_s)
        try:
            content = msgspec.json.encode(note)
            await anyio.to_thread.run_sync(replace_file, self._path, content)
        except OSError as exc:
            if not self._failed:
                log.warning("clock.not_noted", path=str(self._path), cause=str(exc))
            self._failed = True
        else:
            self._failed = False

    def _read(self) -> Note | None:
        try:
            with self._path.open("rb") as file:
                return msgspec.json.decode(file.read(_BYTES_MAX), type=Note)
        except (OSError, ValueError):  # none yet, or a damaged one
            return None

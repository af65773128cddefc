"""The gains of models by drafts in the last days, in a small file of the state directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from operator import add, sub
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread
import msgspec
import structlog

from ..state_files import replace_file

DAYS = 7
"""Days of UTC whose gains are kept, the present one included."""
DAY_S = 86_400
SAVE_S = 60.0
"""The time between two writes of the file; a kill loses the gains since the last one."""
FILE_BYTES_MAX = 1 << 20
VERSION = 1
log = structlog.get_logger()


class DraftGain(NamedTuple):
    """Tokens that drafters proposed, how many of them were accepted, and the steps with drafts:
    their tokens and time, and the time that these tokens would have taken without drafts, in
    microseconds, because sums of integers are exact.
    """

    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    us: int = 0
    plain_us: int = 0

    def plus(self, other: DraftGain) -> DraftGain:
        return DraftGain(*map(add, self, other))

    def minus(self, other: DraftGain) -> DraftGain:
        return DraftGain(*map(sub, self, other))


NO_GAIN = DraftGain()


class GainFile(msgspec.Struct):
    """The content of the file: the gains by model and day, a number of days since 1970."""

    version: int = VERSION
    models: dict[str, dict[int, DraftGain]] = {}


class DraftGains:
    """The gains of models by day. Owned by the event loop. *totals* returns the gains of all models
    since the daemon's start, whose number is bounded. *now* is the machine's clock.
    """

    def __init__(
        self,
        path: Path,
        totals: Callable[[], Mapping[str, DraftGain]],
        now: Callable[[], float] = time.time,
    ):
        self._path, self._totals, self._now = path, totals, now
        self._seen: Mapping[str, DraftGain] = {}
        self._days = self._read()
        self._saved = self._encoded()
        self._cause = ""
        """Why the last write failed."""

    def gain_of(self, model: str) -> DraftGain:
        """Return what drafts have brought a model in the last `DAYS`."""
        self._count()
        gain = NO_GAIN
        for one in self._days.get(model, {}).values():
            gain = gain.plus(one)
        return gain

    async def run(self) -> None:
        """Write the file when gains have changed, until cancelled, and then once more."""
        try:
            while True:
                await anyio.sleep(SAVE_S)
                self._count()
                content = self._encoded()
                if content != self._saved:
                    self._note(content, await anyio.to_thread.run_sync(self._write, content))
        finally:
            self._count()
            content = self._encoded()
            if content != self._saved:
                self._note(content, self._write(content))

    def _count(self) -> None:
        """Add the growth of the totals since the last call to the present day, and forget old days.
        The clock may have been set back, to a day before those that are known.
        """
        totals, today = self._totals(), int(self._now() // DAY_S)
        for name, total in totals.items():
            grown = total.minus(self._seen.get(name, NO_GAIN))
            if grown != NO_GAIN:
                days = self._days.setdefault(name, {})
                days[today] = days.get(today, NO_GAIN).plus(grown)
        self._seen = dict(totals)
        self._days = {
            name: kept
            for name, days in self._days.items()
            if (kept := {day: one for day, one in days.items() if abs(today - day) < DAYS})
        }

    def _encoded(self) -> bytes:
        return msgspec.json.encode(GainFile(models=self._days))

    def _write(self, content: bytes) -> str:
        """Write the file; return why it cannot be written, or an empty text."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(self._path, content)
        except OSError as exc:
            return str(exc)
        return ""

    def _note(self, content: bytes, cause: str) -> None:
        """Note the end of a write. One that fails is repeated, and logged once."""
        if not cause:
            self._saved = content
        elif cause != self._cause:
            log.warning("drafts.unsaved", file=str(self._path), cause=cause)
        self._cause = cause

    def _read(self) -> dict[str, dict[int, DraftGain]]:
        """Return the gains in the file. One that cannot be read counts as empty."""
        try:
            with self._path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
            if len(data) > FILE_BYTES_MAX:
                raise ValueError(f"it has more than {FILE_BYTES_MAX} bytes")
            found = msgspec.json.decode(data, type=GainFile)
            if found.version != VERSION:
                raise ValueError(f"it has version {found.version}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:  # not JSON, or of another form or version
            log.warning("drafts.ignored", file=str(self._path), cause=str(exc))
            return {}
        return found.models

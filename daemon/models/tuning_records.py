"""Records of measured settings in the state directory, one small file.

A change writes a new file and renames it into place, so that a kill at any line leaves the old file
or the new one. The daemon and `inferd tune` may write it, one after the other. A file that cannot
be read counts as empty: everything in it can be measured again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ...backends.tuning_choice import ModelShape, TuningRecord
from ..state_files import TUNING_FILE, replace_file

TUNING_VERSION = 1
RECORDS_MAX = 64
"""Records that are kept; the one measured longest ago is dropped first."""
TUNING_BYTES_MAX = 1 << 20
"""A record takes about 1 kB."""


class TuningFile(msgspec.Struct):
    """The content of the file."""

    version: int = TUNING_VERSION
    records: list[TuningRecord] = []


def read_records(path: Path) -> tuple[TuningRecord, ...]:
    """Return the records in a file.

    :raises OSError: the file cannot be read.
    :raises ValueError: it is damaged, too large, or of another version.
    """
    with path.open("rb") as file:
        data = file.read(TUNING_BYTES_MAX + 1)
    if len(data) > TUNING_BYTES_MAX:
        raise ValueError(f"it has more than {TUNING_BYTES_MAX} bytes")
    found = msgspec.json.decode(data, type=TuningFile)
    if found.version != TUNING_VERSION:
        raise ValueError(f"it has version {found.version}")
    return tuple(found.records[-RECORDS_MAX:])


class TuningRecords:
    """The records below *state_dir*. Owned by one thread; each call reads the file again if another
    process has replaced it.
    """

    def __init__(self, state_dir: Path):
        self._path = state_dir / TUNING_FILE
        self._read_for: tuple[int, ...] | None = None
        self._records: tuple[TuningRecord, ...] = ()

    def of_machine(self, cpu: str, build: str) -> tuple[TuningRecord, ...]:
        """Return the records of this CPU and build of the engine, oldest first."""
        return tuple(r for r in self._current() if (r.cpu, r.build) == (cpu, build))

    def store(self, record: TuningRecord) -> None:
        """Store *record* in place of an earlier one of its shape, CPU and build. Only a requested
        record replaces a requested one, which `inferd tune` may have stored since a model was
        loaded and measured.

        :raises OSError: the file cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked():
            found = self._current()
            if not record.requested and any(r.requested for r in found if _key(r) == _key(record)):
                return
            kept = [r for r in found if _key(r) != _key(record)]
            kept = [*kept, record][-RECORDS_MAX:]
            content = msgspec.json.encode(TuningFile(records=kept), order="deterministic")
            replace_file(self._path, content)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of writers, which are done within milliseconds. Never wait for it: at worst
        one of two records is lost, and measured again.
        """
        path = self._path.with_suffix(".lock")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def _current(self) -> tuple[TuningRecord, ...]:
        signature = self._signature()
        if signature != self._read_for:
            self._read_for, self._records = signature, ()
            if signature is not None:
                try:
                    self._records = read_records(self._path)
                except (OSError, ValueError) as exc:  # not JSON, or of another form or version
                    import structlog  # here: `inferd doctor` reads records without it

                    structlog.get_logger().warning(
                        "tuning.ignored", file=str(self._path), cause=str(exc)
                    )
        return self._records

    def _signature(self) -> tuple[int, ...] | None:
        """Return numbers that change with the file; None if there is none."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _key(record: TuningRecord) -> tuple[ModelShape, str, str]:
    return record.shape, record.cpu, record.build

"""The format of the file with measured settings, and its reading, without the daemon's packages."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ....backends.tuning_choice import TuningRecord

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

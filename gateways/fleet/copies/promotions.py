"""Records of copies that have become sessions, in a file of the entry's state directory.

A record is on disk before the copy can be used. While the record exists, the session is on the
copy's node, whatever the session's old node has when it is back.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from ....backends.errors import Busy, InvalidArgument
from ..certificates.folder import write_private
from ..entry.placing.homes import FleetUser, SessionKey

log = logging.getLogger(__name__)

RECORDS_MAX = 100_000
LINES_SPARE = 1000
"""Lines of ended records beyond which the file is written anew."""


class Promotion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file. With `has_ended` it removes the record, as one node alone has the session
    again.
    """

    user: str
    label: str
    session_id: str
    home: str
    follower: str
    stream: str
    is_kept: bool = False
    """Whether the copy has become the session. Until then, the copy may have been lost."""
    has_ended: bool = False

    @property
    def key(self) -> SessionKey:
        """The session."""
        return SessionKey(FleetUser(self.user, self.label), self.session_id)


class Promotions:
    """The records by session. Owned by the entry's event loop; `write` blocks until they are on
    disk.
    """

    def __init__(self, folder: Path):
        self._file = folder / "promotions.jsonl"
        self._records: dict[SessionKey, Promotion] = {}
        self._lines = 0

    def __len__(self) -> int:
        return len(self._records)

    def open(self) -> None:
        """Read the file. An incomplete last line belongs to a record that was not used.

        :raises InvalidArgument: it cannot be read.
        """
        try:
            text = self._file.read_bytes() if self._file.exists() else b""
            for line in text.split(b"\n")[:-1]:
                self._note(msgspec.json.decode(line, type=Promotion))
            self._write_anew()
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the promoted copies in {self._file} cannot be read: {exc}",
                hint="the file says which node has a session after a loss: restore it if possible",
            ) from None

    def find(self, key: SessionKey) -> Promotion | None:
        """Return the record of a session."""
        return self._records.get(key)

    def all(self) -> list[Promotion]:
        """Return all records."""
        return list(self._records.values())

    def _note(self, record: Promotion) -> None:
        if record.has_ended:
            self._records.pop(record.key, None)
        else:
            self._records[record.key] = record

    def write(self, record: Promotion) -> None:
        """Write a record, or its end; the line is on disk before this returns.

        :raises Busy: there are too many records.
        :raises OSError: the line cannot be written, and does not count.
        """
        is_new = not record.has_ended and record.key not in self._records
        if is_new and len(self._records) >= RECORDS_MAX:
            raise Busy(
                f"there are {RECORDS_MAX} records of promoted copies",
                hint="bring lost nodes back, or remove them from the fleet",
            )
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            try:
                line = msgspec.json.encode(record) + b"\n"
                if os.pwrite(descriptor, line, size) != len(line):
                    raise OSError("the line was not written as a whole")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
        self._note(record)
        self._lines += 1
        if self._lines > 2 * len(self._records) + LINES_SPARE:
            try:
                self._write_anew()
            except OSError as exc:  # the record is on disk; the next one tries this again
                log.warning("%s stays long: %s", self._file, exc)

    def _write_anew(self) -> None:
        lines = [msgspec.json.encode(record) + b"\n" for record in self._records.values()]
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(self._file, b"".join(lines))
        self._lines = len(lines)

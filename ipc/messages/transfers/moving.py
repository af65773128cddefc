"""Messages of the calls that move a session from one daemon to another."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..base import Map

PART_BYTES = 512 << 10
"""Bytes of an exported session in one reply, and in one request."""
TRANSFER_CHARACTERS_MAX = 64
TransferId = Annotated[str, msgspec.Meta(min_length=1, max_length=TRANSFER_CHARACTERS_MAX)]
Offset = Annotated[int, msgspec.Meta(ge=0)]


class ExportParams(Map):
    """`export_session`: read a dormant session from *offset* on. Offset 0 begins the transfer,
    whose id the caller chooses. `uid` is the session's user, by default the caller's; `peer` is the
    caller's name for the other daemon.
    """

    session_id: str
    transfer: TransferId
    uid: int | None = None
    label: str = ""
    peer: str = ""
    offset: Offset = 0


class ExportResult(Map):
    """The next bytes of the exported session, whose length is `size`. `on_behalf_of` names the
    session's user for the import.
    """

    data: bytes
    size: int
    on_behalf_of: str = ""


class ImportParams(Map):
    """`import_session`: write the next bytes of an exported session, whose length is `size`."""

    session_id: str
    transfer: TransferId
    data: bytes
    size: Offset
    on_behalf_of: str = ""
    label: str = ""
    peer: str = ""
    offset: Offset = 0


class ImportResult(Map):
    """The number of bytes that the daemon takes in all. The session has arrived once they are
    written.
    """

    size: int


class EndTransferParams(Map):
    """`end_transfer` with an outcome: the session stays on this daemon (`keep`) or leaves it
    (`release`), or its copy or record on this daemon is deleted (`drop`).
    """

    transfer: TransferId
    outcome: Literal["keep", "release", "drop"]

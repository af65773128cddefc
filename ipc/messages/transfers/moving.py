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
    """The session."""
    transfer: TransferId
    """The transfer's id, of 1 to 64 characters; it must be a new one for each transfer."""
    uid: int | None = None
    """The session's user, who may be another one for an operator; nil: the caller's."""
    label: str = ""
    """The session's [label](#labels)."""
    peer: str = ""
    """The caller's name of the other daemon, for `sessions`."""
    offset: Offset = 0
    """The first byte of the part; 0 begins the transfer."""


class ExportResult(Map):
    """The next bytes of the exported session, whose length is `size`. `on_behalf_of` names the
    session's user for the import.
    """

    data: bytes
    """The part."""
    size: int
    """The size of all parts."""
    on_behalf_of: str = ""
    """The session's user as a [gateway](#gateways) has named it; empty: the caller's user."""


class ImportParams(Map):
    """`import_session`: write the next bytes of an exported session, whose length is `size`."""

    session_id: str
    """The session."""
    transfer: TransferId
    """The transfer's id."""
    data: bytes
    """The part."""
    size: Offset
    """The size of all parts."""
    on_behalf_of: str = ""
    """The session's user; empty: the caller's."""
    label: str = ""
    """The session's label."""
    peer: str = ""
    """The caller's name of the other daemon, for `sessions`."""
    offset: Offset = 0
    """The first byte of the part; 0 begins again."""


class ImportResult(Map):
    """The number of bytes that the daemon takes in all. The session has arrived once they are
    written.
    """

    size: int
    """The number of bytes after which the session has arrived."""


class EndTransferParams(Map):
    """`end_transfer` with an outcome: the session stays on this daemon (`keep`) or leaves it
    (`release`), or its copy or record on this daemon is deleted (`drop`).
    """

    transfer: TransferId
    """The transfer's id."""
    outcome: Literal["keep", "release", "drop"]
    """Of a held session, on the connection that exports it: `keep` or `release`; of an arriving
    one, or of a [copy](#copies-of-sessions): `keep` or `drop`; of the record of a departed one:
    `drop`.
    """

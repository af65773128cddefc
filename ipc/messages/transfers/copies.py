"""Messages of the copies of sessions, from which a session continues after the loss of a daemon."""

from __future__ import annotations

from ..base import Map
from .moving import Offset, TransferId


class CopiedChange(Map):
    """A change of a session with an id, sent to a client with `copies` in its hello, before the
    reply that acknowledges it.

    The changes of a `stream` are numbered from 1. The first one has the `whole` session; later ones
    may have it too. `data` is for `store_copy`. If the session was deleted, or the change is too
    large for a frame, only the reason is sent: `state` is `deleted` or `too-large`.
    """

    session_id: str
    stream: str
    number: int
    data: bytes = b""
    whole: bool = False
    model: str = ""
    state: str = ""


class ReadCopyParams(Map):
    """`read_copy`: read a whole session with an id, open or dormant."""

    session_id: str
    on_behalf_of: str = ""
    label: str = ""


class ReadCopyResult(Map):
    """The whole session as a change; see `CopiedChange`. An open session's stream continues after
    it.
    """

    stream: str
    number: int
    data: bytes
    model: str


class StoreCopyParams(Map):
    """`store_copy`: apply a change to the copy of a session that is on the daemon `peer`. `size` is
    the length of the whole change, which may be sent in parts.
    """

    session_id: str
    stream: TransferId
    number: Offset
    data: bytes
    size: Offset
    on_behalf_of: str = ""
    label: str = ""
    peer: str = ""
    offset: Offset = 0

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
    """The session."""
    stream: str
    """The opening of the session; its changes are numbered."""
    number: int
    """The number, from 1. The first change has the whole session."""
    data: bytes = b""
    """The change, for `store_copy` of a daemon of the same version."""
    whole: bool = False
    """Whether it has the whole session."""
    model: str = ""
    """The session's model."""
    state: str = ""
    """`deleted`: the session no longer exists; `too-large`: the change does not fit into a
    frame, and is not sent.
    """


class ReadCopyParams(Map):
    """`read_copy`: read a whole session with an id, open or dormant."""

    session_id: str
    """The session."""
    on_behalf_of: str = ""
    """The session's user; empty: the caller's."""
    label: str = ""
    """The session's label."""


class ReadCopyResult(Map):
    """The whole session as a change; see `CopiedChange`. An open session's stream continues after
    it.
    """

    stream: str
    """The stream; if the session is open and its changes are sent, they continue this stream."""
    number: int
    """The number of this change in it."""
    data: bytes
    """The whole session as a change."""
    model: str
    """The session's model."""


class StoreCopyParams(Map):
    """`store_copy`: apply a change to the copy of a session that is on the daemon `peer`. `size` is
    the length of the whole change, which may be sent in parts.
    """

    session_id: str
    """The session."""
    stream: TransferId
    """The stream of the change, of 1 to 64 characters."""
    number: Offset
    """Its number."""
    data: bytes
    """The change, or a part of it."""
    size: Offset
    """The size of all parts."""
    on_behalf_of: str = ""
    """The session's user; empty: the caller's."""
    label: str = ""
    """The session's label."""
    peer: str = ""
    """The caller's name of the daemon that has the session, for `sessions`."""
    offset: Offset = 0
    """The first byte of the part; 0 begins again."""

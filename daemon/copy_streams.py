"""Changes of open sessions on their way to clients that want copies of them."""

from __future__ import annotations

import secrets

from ..ipc.messages import CopiedChange, Kind
from ..ipc.server.connection import ServerConnection
from ..sessions import ChangeSender, CopyChange, Recording, encode_change
from ..wire.frames import REPLY_BYTES_MAX

CHANGE_BYTES_MAX = REPLY_BYTES_MAX - (1 << 10)
"""Maximum size of a change, so that it fits into a frame to a client."""
NO_REQUEST = 0
"""The request id of a change that no reply acknowledges."""
_COPY = int(Kind.COPY)
_NOTHING = CopyChange()


class _Stream:
    """The id of a stream of one open session's changes, and the number of the last change."""

    def __init__(self) -> None:
        self.id = secrets.token_hex(16)
        self.number = 0


class ConnectionCopies(ChangeSender):
    """Sends the changes of a connection's sessions. Lives on the daemon's event loop."""

    def __init__(self, connection: ServerConnection):
        self._connection = connection
        self._streams: dict[Recording, _Stream] = {}
        self._changed: dict[Recording, None] = {}
        self._deleted: dict[Recording, None] = {}

    def note_changed(self, recording: Recording) -> None:
        """Send the change of a session before the next reply."""
        self._changed[recording] = None

    def note_erased(self, recording: Recording) -> None:
        """Report before the next reply that a session was deleted."""
        self._changed.pop(recording, None)
        self._deleted[recording] = None

    def send_change(self, recording: Recording) -> None:
        """Send the change of a session now."""
        self._changed.pop(recording, None)
        self._send(recording, NO_REQUEST)
        self._connection.flush()

    def send_changes(self, request: int) -> None:
        """Send all changes before the reply of a request, with which they are flushed."""
        changed, self._changed = self._changed, {}
        deleted, self._deleted = self._deleted, {}
        for recording in changed:
            self._send(recording, request)
        for recording in deleted:
            stream = self._streams.pop(recording, None) or _Stream()
            self._send_frame(recording, stream, request, state="deleted")

    def _send(self, recording: Recording, request: int) -> None:
        stream = self._streams.setdefault(recording, _Stream())
        change = recording.take_copy() if recording.is_copied else None
        if change is None or change == _NOTHING:
            return
        stream.number += 1
        data = encode_change(change)
        if len(data) > CHANGE_BYTES_MAX:
            self._send_frame(recording, stream, request, state="too-large")
        else:
            self._send_frame(recording, stream, request, data=data, whole=change.past is not None)

    def _send_frame(
        self,
        recording: Recording,
        stream: _Stream,
        request: int,
        *,
        data: bytes = b"",
        whole: bool = False,
        state: str = "",
    ) -> None:
        change = CopiedChange(
            session_id=recording.key[1],
            stream=stream.id,
            number=stream.number,
            data=data,
            whole=whole,
            model=recording.model,
            state=state,
        )
        self._connection.send([_COPY, request, change], flush=False)

    def read_whole(self, recording: Recording, media: tuple[bytes, ...]) -> tuple[_Stream, bytes]:
        """Return an open session's stream, and the whole session as its next change, not sent."""
        self._changed.pop(recording, None)
        stream = self._streams.setdefault(recording, _Stream())
        stream.number += 1
        return stream, encode_change(recording.take_copy(whole=True, media=media))


class CopyStreams:
    """The connections whose clients want copies. Owned by the daemon's event loop."""

    def __init__(self) -> None:
        self._connections: dict[object, ConnectionCopies] = {}

    def copier_of(self, connection: object) -> ConnectionCopies | None:
        """Return the copier of a connection; None if its client wants no copies."""
        found = self._connections.get(connection)
        if found is None and isinstance(connection, ServerConnection) and connection.wants_copies:
            found = self._connections[connection] = ConnectionCopies(connection)
        return found

    def send_changes(self, connection: ServerConnection, request: int) -> None:
        """Send the changes of a connection's sessions before the reply of a request."""
        found = self._connections.get(connection)
        if found is not None:
            found.send_changes(request)

    def remove_connection(self, connection: ServerConnection) -> None:
        """Forget a connection that was closed."""
        self._connections.pop(connection, None)

"""Bounds on frames that have begun to arrive: their bytes per user and in all, and their time."""

from __future__ import annotations

from ...backends.errors import ProtocolError
from .connection import ServerConnection
from .fairness import SharedLimit
from .socket_connection import ArrivalTimer, Pause

INCOMPLETE_BYTES_MAX = 64 << 20
"""Bytes of all incomplete frames. A user has at most as many as are free; alone, half of all."""
FRAME_S_MAX = 30.0
"""Time for one frame to arrive. The largest takes milliseconds on this machine."""


class IncompleteFrames:
    """The incomplete frames, one per connection at most. Lives on the daemon's event loop.

    A frame counts with its announced size from its first bytes on. If a frame does not fit, nothing
    more is read from its connection until frames of its user, or of others, have ended.
    """

    def __init__(self, bytes_max: int = INCOMPLETE_BYTES_MAX, seconds_max: float = FRAME_S_MAX):
        self.shares = SharedLimit(bytes_max)
        self._seconds_max = seconds_max
        self._sizes: dict[ServerConnection, int] = {}
        self._timers: dict[ServerConnection, ArrivalTimer] = {}
        """The timer of each connection whose frame is being read."""
        self._waiting: dict[ServerConnection, None] = {}
        """Connections that are not read from, in the order in which they began to wait."""

    def begin_frame(self, connection: ServerConnection, size: int) -> None:
        """Count a frame of *size* bytes that has not arrived completely, if it is not counted."""
        if self._sizes.get(connection) == size:
            return
        self.end_frame(connection)
        self._sizes[connection] = size
        if self.shares.fits(connection.uid, size):
            self._read_frame(connection)
        else:
            self._waiting[connection] = None
            connection.pause_reading(Pause.FRAME)

    def _read_frame(self, connection: ServerConnection) -> None:
        self.shares.take_amount(connection.uid, self._sizes[connection])
        self._start_timer(connection)

    def _start_timer(self, connection: ServerConnection) -> None:
        error = ProtocolError(
            f"a frame has not arrived completely within {self._seconds_max:g} s",
            hint="send a frame at once, and read replies meanwhile",
        )
        self._timers[connection] = ArrivalTimer(connection, self._seconds_max, error)

    def end_frame(self, connection: ServerConnection) -> None:
        """Forget a connection's frame, because it is complete or the connection has ended."""
        size = self._sizes.pop(connection, 0)
        if not size:
            return
        if connection in self._waiting:
            del self._waiting[connection]
            return
        self._timers.pop(connection).cancel()
        self.shares.take_amount(connection.uid, -size)
        for waiting in tuple(self._waiting):
            if self.shares.fits(waiting.uid, self._sizes[waiting]):
                del self._waiting[waiting]
                self._read_frame(waiting)
                waiting.resume_reading(Pause.FRAME)

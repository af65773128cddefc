"""Bounds on frames that have begun to arrive: their bytes per user and in all, and their time."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...backends.errors import ProtocolError
from .fairness.shares import SharedLimit
from .server_connection import Pause

INCOMPLETE_BYTES_MAX = 64 << 20
"""Bytes of all incomplete frames. A user has at most as many as are free; alone, half of all."""
FRAME_S_MAX = 30.0
"""Time for one frame to arrive. The largest takes milliseconds on this machine."""


class Sender(Protocol):
    """The part of a connection that these bounds use."""

    @property
    def uid(self) -> int:
        """The user."""

    was_delayed: bool
    """Whether the daemon has delayed reading for a reason other than these bounds."""

    def pause_reading(self, reason: Pause) -> None:
        """Read nothing until reading is resumed for this *reason*."""

    def resume_reading(self, reason: Pause) -> None:
        """Read again unless there are other reasons to pause."""

    def end(self, error: Exception) -> None:
        """End the connection with an error."""


class ArrivalTimer:
    """Ends a connection with *error* if its data has not arrived after *seconds_max*. The time
    begins again if the daemon has delayed reading.
    """

    def __init__(self, sender: Sender, seconds_max: float, error: ProtocolError):
        self._sender, self._seconds_max, self._error = sender, seconds_max, error
        self._start()

    def _start(self) -> None:
        self._sender.was_delayed = False
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(self._seconds_max, self._end_late)

    def _end_late(self) -> None:
        if self._sender.was_delayed:
            self._start()
        else:
            self._sender.end(self._error)

    def cancel(self) -> None:
        """Stop the timer, because the data has arrived or the connection has ended."""
        self._handle.cancel()


class IncompleteFrames:
    """The incomplete frames, one per connection at most. Lives on the daemon's event loop.

    A frame counts with its announced size from its first bytes on. If a frame does not fit, nothing
    more is read from its connection until frames of its user, or of others, have ended.
    """

    def __init__(self, bytes_max: int = INCOMPLETE_BYTES_MAX, seconds_max: float = FRAME_S_MAX):
        self.shares = SharedLimit(bytes_max)
        self._seconds_max = seconds_max
        self._sizes: dict[Sender, int] = {}
        self._timers: dict[Sender, ArrivalTimer] = {}
        """The timer of each connection whose frame is being read."""
        self._waiting: dict[Sender, None] = {}
        """Connections that are not read from, in the order in which they began to wait."""

    def begin_frame(self, sender: Sender, size: int) -> None:
        """Count a frame of *size* bytes that has not arrived completely, if it is not counted."""
        if self._sizes.get(sender) == size:
            return
        self.end_frame(sender)
        self._sizes[sender] = size
        if self.shares.fits(sender.uid, size):
            self._read_frame(sender)
        else:
            self._waiting[sender] = None
            sender.pause_reading(Pause.FRAME)

    def _read_frame(self, sender: Sender) -> None:
        self.shares.take_amount(sender.uid, self._sizes[sender])
        self._start_timer(sender)

    def _start_timer(self, sender: Sender) -> None:
        error = ProtocolError(
            f"a frame has not arrived completely within {self._seconds_max:g} s",
            hint="send a frame at once, and read replies meanwhile",
        )
        self._timers[sender] = ArrivalTimer(sender, self._seconds_max, error)

    def end_frame(self, sender: Sender) -> None:
        """Forget a connection's frame, because it is complete or the connection has ended."""
        size = self._sizes.pop(sender, 0)
        if not size:
            return
        if sender in self._waiting:
            del self._waiting[sender]
            return
        self._timers.pop(sender).cancel()
        self.shares.take_amount(sender.uid, -size)
        for waiting in tuple(self._waiting):
            if self.shares.fits(waiting.uid, self._sizes[waiting]):
                del self._waiting[waiting]
                self._read_frame(waiting)
                waiting.resume_reading(Pause.FRAME)

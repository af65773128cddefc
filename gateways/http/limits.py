"""Bounds of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

REQUESTS_PER_CONNECTION_MAX = 240
"""Requests of one connection to the daemon, which allows 256; the others are for cancelling."""
WAITING_PAUSE_S = 10.0
"""The pause between two comments while a turn waits and its place does not change."""
PLACE_PAUSE_S = 0.5
"""The least pause between two reports of a place in the queue, which changes often beside many
streams.
"""
HEADER_BYTES_MAX = 64 << 10
CLOSE_S_MAX = 5.0
RESTART_S_MAX = 30.0
"""The time for which a request waits for a daemon that restarts."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds for all callers together, and for each request."""

    requests_max: int = 600
    """Requests at once; a further one gets 503."""
    streams_max: int = 256
    """Streams of events at once; a further one gets 503."""
    clients_max: int = 1024
    """Connections of clients; on a further one, requests get 503."""
    connections_max: int = 16
    """Connections to the daemon."""
    body_bytes_max: int = 8 << 20
    receive_s_max: float = 30.0
    """The time in which a request must arrive, and a client must read a part of its answer."""
    queue_s_max: float = 300.0
    """The time that a request waits for a session's place and for its turn."""
    turn_s_max: float = 600.0
    """The time of a request from its arrival to the end of its answer."""
    hold_s: float = 0.02
    """The time that a stream's headers are held, so that an early error has its own status."""
    stop_s_max: float = 10.0
    """The time that requests have to end after SIGTERM."""

"""Bounds of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

OLD_OUTPUT_BYTES_MAX = 65536
"""The buffer size of a client that does not send it; WasmEdge's before it sent this field."""
UNREAD_BYTES_MAX = 1 << 20
"""The most bytes that may wait until a client reads them; beyond that its connection is closed.
The data of replies is held back until the client has read; answers to its pings and settings are
not.
"""
STOP_S_MAX = 10.0
"""The time that calls under way have to end after SIGTERM."""
ERROR_CHARACTERS_MAX = 1000
"""The length of an error's text, which is sent as a header."""


@dataclass(frozen=True)
class Limits:
    """Bounds for all clients together and for each of them.

    Further connections are closed at once. gRPC lets further calls of a client wait. The default
    size of a request is that of other gRPC servers.
    """

    connections_max: int = 64
    contexts_max: int = 64
    graphs_max: int = 64
    calls_max: int = 16
    message_bytes_max: int = 4 << 20

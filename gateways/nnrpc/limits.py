"""Bounds of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

OLD_OUTPUT_BYTES_MAX = 65536
"""The buffer of a client that does not send its size: WasmEdge's before it sent this field."""
UNREAD_BYTES_MAX = 1 << 20
"""Of replies that a client does not read. A reply's data waits until the client has read; the
answers to its pings and settings do not.
"""
STOP_S_MAX = 10.0
"""The time that calls under way have to end after SIGTERM."""
ERROR_CHARACTERS_MAX = 1000
"""Of an error's text, which is sent as a header."""


@dataclass(frozen=True)
class Limits:
    """Bounds for all clients and for each.

    Further connections are closed at once. gRPC lets further calls of a client wait. The default
    size of a request is that of other gRPC servers.
    """

    connections_max: int = 64
    contexts_max: int = 64
    graphs_max: int = 64
    calls_max: int = 16
    message_bytes_max: int = 4 << 20

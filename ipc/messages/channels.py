"""Messages of the call that opens a channel, by which a client reaches the process of a graph."""

from __future__ import annotations

from .graphs import GraphParams


class OpenChannelParams(GraphParams):
    """`open_channel`: one end of a pair of sockets, for the process of a graph."""

    fd: int
    """0 or more: a connected Unix stream socket in a [descriptor](#descriptors)."""

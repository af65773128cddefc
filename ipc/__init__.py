"""The protocol: framing, messages, the client and its synchronous wrapper, and the daemon's end.

Knows nothing of sessions and models. The room itself offers the client; what the daemon needs is
imported from `ipc.server` and `ipc.messages`.
"""

from __future__ import annotations

from .client.client import AsyncClient
from .client.embeddings import Embeddings
from .client.sessions.pull import AsyncPull
from .client.sessions.session import AsyncSession
from .client.streams.answers import Answer
from .client.streams.async_stream import AsyncStream
from .client.streams.texts import Piece, Rendered, Reply
from .client.sync.sync_client import Client, Session
from .client.sync.sync_streams import Pull, Stream
from .handles import Context, Graph
from .messages import (
    PROTOCOL_VERSION,
    AddAdapterResult,
    ComputeResult,
    ForkResult,
    QueueEvent,
    RewindResult,
    ServerHello,
    SwapResult,
    Tensor,
)
from .paths import client_socket_path, daemon_socket_path
from .payloads import Priority, Prompt, TensorLike

__all__ = (
    "PROTOCOL_VERSION",
    "AddAdapterResult",
    "Answer",
    "AsyncClient",
    "AsyncPull",
    "AsyncSession",
    "AsyncStream",
    "Client",
    "ComputeResult",
    "Context",
    "Embeddings",
    "ForkResult",
    "Graph",
    "Piece",
    "Priority",
    "Prompt",
    "Pull",
    "QueueEvent",
    "Rendered",
    "Reply",
    "RewindResult",
    "SwapResult",
    "ServerHello",
    "Session",
    "Stream",
    "Tensor",
    "TensorLike",
    "client_socket_path",
    "daemon_socket_path",
)

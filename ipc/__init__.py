"""The protocol: framing, messages, the client and its synchronous twin, and the daemon's end.

Knows nothing of sessions and models. The room itself offers the client; what the daemon needs is
imported from `ipc.server` and `ipc.messages`.
"""

from __future__ import annotations

from .answers import Answer
from .client import AsyncClient
from .embedding import Embeddings
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
from .pull import AsyncPull
from .session import AsyncSession
from .streams import AsyncStream
from .sync import Client, Session
from .sync_streams import Pull, Stream
from .texts import Piece, Rendered, Reply

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

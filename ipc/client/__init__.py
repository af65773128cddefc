"""The client library: `AsyncClient`, its synchronous wrapper `Client`, and their results."""

from __future__ import annotations

from ...backends.errors import ErrorFields
from ...backends.tensors import TensorInfo
from ..handles import Context, Graph
from ..media_parts import Audio, Image
from ..messages import (
    PROTOCOL_VERSION,
    AddAdapterResult,
    AddModelResult,
    BufferResult,
    ComputeResult,
    CopyModelResult,
    DrainResult,
    EndReasoningResult,
    ExportModelResult,
    ExportResult,
    ForkResult,
    HistoryResult,
    ImportModelResult,
    ImportResult,
    Infill,
    QueueEvent,
    ReadCopyResult,
    ReadFileResult,
    RewindResult,
    SaveStateResult,
    ServerHello,
    SessionMediaResult,
    SwapResult,
    Tensor,
    ToolCallPart,
)
from ..names import Priority
from ..paths import client_socket_path, daemon_socket_path
from ..payloads import Message, Prompt, TensorLike
from .buffers import Buffer, BufferView
from .client import AsyncClient
from .embeddings import Embeddings
from .functions import Tool
from .graphs import AsyncTensorGraph
from .jobs import AsyncJobs
from .kept_tensors import KeptTensor
from .parameters import Options, Parameters
from .reranking import RankedDocument, Ranking
from .results import (
    DeletionInfo,
    FileInfo,
    JobFileInfo,
    JobInfo,
    Metadata,
    ModelInfo,
    ParameterInfo,
    SessionInfo,
    ShownModel,
    StateInfo,
    Stats,
    TaskInfo,
    UsageInfo,
)
from .session import AsyncPull, AsyncSession
from .streams import AsyncStream
from .sync_client import Client, Jobs, Pull, Session, Stream, TensorGraph
from .texts import Answer, Piece, Rendered, Reply, ToolCall

__all__ = (
    "AddAdapterResult",
    "AddModelResult",
    "Answer",
    "AsyncClient",
    "AsyncJobs",
    "AsyncPull",
    "AsyncSession",
    "AsyncStream",
    "AsyncTensorGraph",
    "Audio",
    "Buffer",
    "BufferResult",
    "BufferView",
    "Client",
    "client_socket_path",
    "ComputeResult",
    "Context",
    "CopyModelResult",
    "daemon_socket_path",
    "DrainResult",
    "DeletionInfo",
    "Embeddings",
    "EndReasoningResult",
    "ErrorFields",
    "ExportModelResult",
    "ExportResult",
    "FileInfo",
    "ForkResult",
    "Graph",
    "HistoryResult",
    "Image",
    "Infill",
    "ImportModelResult",
    "ImportResult",
    "JobFileInfo",
    "JobInfo",
    "Jobs",
    "KeptTensor",
    "Message",
    "Metadata",
    "ModelInfo",
    "Options",
    "ParameterInfo",
    "Parameters",
    "Piece",
    "Priority",
    "Prompt",
    "PROTOCOL_VERSION",
    "Pull",
    "QueueEvent",
    "RankedDocument",
    "Ranking",
    "ReadCopyResult",
    "ReadFileResult",
    "Rendered",
    "Reply",
    "RewindResult",
    "SaveStateResult",
    "ServerHello",
    "Session",
    "SessionInfo",
    "SessionMediaResult",
    "ShownModel",
    "StateInfo",
    "Stats",
    "Stream",
    "SwapResult",
    "TaskInfo",
    "Tensor",
    "TensorGraph",
    "TensorInfo",
    "TensorLike",
    "Tool",
    "ToolCall",
    "ToolCallPart",
    "UsageInfo",
)

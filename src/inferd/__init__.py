"""inferd's Python client, with which programs share language models through a local daemon.

`AsyncClient` and its synchronous wrapper `Client` connect to a running `inferd serve`. Names are
loaded on first use: worker processes import this package too, and do not need the client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__all__ = (
    "AddAdapterResult",
    "AddModelResult",
    "Answer",
    "AsyncClient",
    "AsyncJobs",
    "AsyncPull",
    "AsyncSession",
    "AsyncStream",
    "Audio",
    "BackendError",
    "Busy",
    "Cancelled",
    "Client",
    "ComputeResult",
    "ConnectionLost",
    "Context",
    "ContextFull",
    "DeletionInfo",
    "Embeddings",
    "EndReasoningResult",
    "EndOfSequence",
    "ErrorFields",
    "FileInfo",
    "ForkResult",
    "Graph",
    "HistoryResult",
    "Image",
    "InferdError",
    "InvalidAnswer",
    "InvalidArgument",
    "InvalidEncoding",
    "JobFileInfo",
    "JobInfo",
    "Jobs",
    "LoadFailed",
    "Message",
    "Metadata",
    "ModelInfo",
    "ModelNotFound",
    "NotFound",
    "Options",
    "OutOfMemory",
    "ParameterInfo",
    "Parameters",
    "PermissionDenied",
    "Piece",
    "Priority",
    "PromptTooLong",
    "ProtocolError",
    "Pull",
    "QueueEvent",
    "QuotaExceeded",
    "ReadFileResult",
    "ReaderTimeout",
    "Rendered",
    "Reply",
    "RewindResult",
    "SaveStateResult",
    "Session",
    "SessionBusy",
    "SessionExpired",
    "SessionInfo",
    "SessionMediaResult",
    "ShownModel",
    "ShuttingDown",
    "StateInfo",
    "Stats",
    "Stream",
    "SwapResult",
    "TaskInfo",
    "Tensor",
    "Timeout",
    "TooLarge",
    "Tool",
    "ToolCall",
    "ToolCallPart",
    "UnsupportedOperation",
    "VersionMismatch",
    "WorkerCrashed",
    "__version__",
)
__version__: str = "0.1.0"
"""The same as in pyproject.toml, because `importlib.metadata` would slow down each start."""

if TYPE_CHECKING:
    from .backends.errors import (
        BackendError,
        Busy,
        Cancelled,
        ConnectionLost,
        ContextFull,
        EndOfSequence,
        InferdError,
        InvalidAnswer,
        InvalidArgument,
        InvalidEncoding,
        LoadFailed,
        ModelNotFound,
        NotFound,
        OutOfMemory,
        PermissionDenied,
        PromptTooLong,
        ProtocolError,
        QuotaExceeded,
        ReaderTimeout,
        SessionBusy,
        SessionExpired,
        ShuttingDown,
        Timeout,
        TooLarge,
        UnsupportedOperation,
        VersionMismatch,
        WorkerCrashed,
    )
    from .ipc.client import (
        AddAdapterResult,
        AddModelResult,
        Answer,
        AsyncClient,
        AsyncJobs,
        AsyncPull,
        AsyncSession,
        AsyncStream,
        Audio,
        Client,
        ComputeResult,
        Context,
        DeletionInfo,
        Embeddings,
        EndReasoningResult,
        ErrorFields,
        FileInfo,
        ForkResult,
        Graph,
        HistoryResult,
        Image,
        JobFileInfo,
        JobInfo,
        Jobs,
        Message,
        Metadata,
        ModelInfo,
        Options,
        ParameterInfo,
        Parameters,
        Piece,
        Priority,
        Pull,
        QueueEvent,
        ReadFileResult,
        Rendered,
        Reply,
        RewindResult,
        SaveStateResult,
        Session,
        SessionInfo,
        SessionMediaResult,
        ShownModel,
        StateInfo,
        Stats,
        Stream,
        SwapResult,
        TaskInfo,
        Tensor,
        Tool,
        ToolCall,
        ToolCallPart,
    )
else:  # hidden from type checkers, which would accept every misspelt name as an object

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = _load(name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load(name: str) -> object:
    errors = importlib.import_module(".backends.errors", __name__)
    if hasattr(errors, name):
        return getattr(errors, name)
    return getattr(importlib.import_module(".ipc.client", __name__), name)

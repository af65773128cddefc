"""Execution contexts: input, compute, output."""

from __future__ import annotations

from typing import Any

from .base import Map, Traceparent
from .tensors import Tensor

__all__ = (
    "ComputeParams",
    "ComputeResult",
    "ComputeSingleParams",
    "ComputeSingleResult",
    "ContextParams",
    "ContextResult",
    "FinalizeParams",
    "GetOutputParams",
    "OutputResult",
    "SessionParams",
    "SetInputParams",
)


class SessionParams(Map):
    """`init_execution_context_with_session_id`: an id of 1 to 128 characters, yours alone. Without
    `persist` nothing of the session is written to disk.
    """

    graph: int
    session_id: str
    persist: bool = True


class ContextResult(Map):
    """A context's handle; `attached` tells that the session was there before, with its history."""

    context: int
    attached: bool = False


class ContextParams(Map):
    """A call on an execution context."""

    context: int


class FinalizeParams(Map):
    """`finalize_execution_context`; with `keep`, a session with an id sleeps until it is opened
    again. Without, nothing of it is kept.
    """

    context: int
    keep: bool = False


class SetInputParams(Map):
    """`set_input`: index 1 is metadata JSON, any other a prompt."""

    context: int
    index: int
    tensor: Tensor


class ComputeParams(Map):
    """`compute` on what `set_input` gave, or on named tensors; `priority` is a class's name."""

    context: int
    inputs: list[tuple[str, Tensor]] | None = None
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class ComputeResult(Map):
    """The named outputs, where named inputs were given."""

    outputs: list[tuple[str, Tensor]] = []
    metadata: dict[str, Any] = {}


class ComputeSingleParams(Map):
    """`compute_single`: the next token."""

    context: int
    priority: str = ""
    queue_timeout_s: float = 0.0
    timeout_s: float = 0.0
    traceparent: Traceparent = ""


class ComputeSingleResult(Map):
    """The piece that `get_output_single` would return: it saves that call."""

    piece: bytes = b""


class GetOutputParams(Map):
    """`get_output` and `get_output_single`; past `size_max` bytes (−1: no bound) `TooLarge`."""

    context: int
    index: int = 0
    size_max: int = -1


class OutputResult(Map):
    """Bytes of an output; index 1 is JSON."""

    data: bytes

"""Messages of wasi-nn's calls on execution contexts: opening, input, computing, output."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...wire.metadata import Metadata
from .base import Map, ScheduledParams, Tensor
from .graphs import GraphParams

METADATA_INDEX = 1
"""The index of a context's parameters, as an input, and of its metadata, as an output."""
INPUTS_MAX = 128
"""The largest number of named inputs of one `compute`."""


class OpenParams(GraphParams):
    """`init_execution_context`. `priority` is the class of the context's turns, and of the wait for
    a place; without a `queue_timeout_s` the call does not wait. `from_state` is the name of the
    state with which the context begins, or `OWNER/STATE` for one that an access rule shares.
    """

    priority: str = ""
    queue_timeout_s: float = 0.0
    from_state: str = ""


class SessionParams(Map):
    """`init_execution_context_with_session_id`: an id of the user's own, of 1 to 128 characters.

    Without `persist` nothing of the session is written to disk. `from_state` is the name of the
    state with which a new session begins; an existing one keeps its history.
    """

    graph: int
    session_id: str
    persist: bool = True
    priority: str = ""
    queue_timeout_s: float = 0.0
    from_state: str = ""


class ContextResult(Map):
    """A context's handle. `attached` is true if the session existed before, with its history."""

    context: int
    attached: bool = False


class ContextParams(Map):
    """A call on an execution context."""

    context: int


class FinalizeParams(ContextParams):
    """`finalize_execution_context`: delete the context; with `keep`, a session with an id becomes
    dormant instead.
    """

    keep: bool = False


class SetInputParams(ContextParams):
    """`set_input`: at index 1 parameters as JSON, at any other index a prompt."""

    index: int
    tensor: Tensor


class ComputeParams(ScheduledParams):
    """`compute` of the context's input, or of named tensors."""

    context: int
    inputs: Annotated[list[tuple[str, Tensor]], msgspec.Meta(max_length=INPUTS_MAX)] | None = None


class ComputeResult(Map):
    """The named outputs, if named inputs were sent."""

    outputs: list[tuple[str, Tensor]] = []
    metadata: Annotated[Any, Metadata] = {}


class ComputeSingleParams(ScheduledParams):
    """`compute_single`: compute the next token."""

    context: int


class ComputeSingleResult(Map):
    """The token's text, which `get_output_single` would also return."""

    piece: bytes = b""


class GetOutputParams(ContextParams):
    """`get_output` and `get_output_single`. An output of more than `size_max` bytes is `TooLarge`
    (−1 for no bound).
    """

    index: int = 0
    size_max: int = -1


class OutputResult(Map):
    """Bytes of an output; index 1 is JSON."""

    data: bytes

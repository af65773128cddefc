"""Messages of wasi-nn's calls on execution contexts: opening, input, computing, output."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ...wire.channels import TENSORS_MAX
from ...wire.metadata import Metadata
from .base import Map, ScheduledParams, Tensor
from .graphs import GraphParams

METADATA_INDEX = 1
"""The index of a context's parameters, as an input, and of its metadata, as an output."""
INPUTS_MAX = TENSORS_MAX
"""The largest number of inputs of one `compute`, named or set by their indices, and of outputs that
stay.
"""
FREED_MAX = 1024
"""The largest number of tensors that one call frees."""
Handles = Annotated[list[int], msgspec.Meta(max_length=FREED_MAX)]


class OpenParams(GraphParams):
    """`init_execution_context`. `priority` is the class of the context's turns, and of the wait for
    a place; without a `queue_timeout_s` the call does not wait. `from_state` is the name of the
    state with which the context begins, or `OWNER/STATE` for one that an access rule shares.
    """

    priority: str = ""
    """The class of the context's turns, and of the wait; empty: `normal`."""
    queue_timeout_s: float = 0.0
    """The longest wait for a place; 0: fail at once."""
    from_state: str = ""
    """The name of the [state](#save_state) with which the context begins, or of a
    [shared](#shared-states) one; empty: no history.
    """


class SessionParams(Map):
    """`init_execution_context_with_session_id`: an id of the user's own, of 1 to 128 characters.

    Without `persist` nothing of the session is written to disk. `from_state` is the name of the
    state with which a new session begins; an existing one keeps its history.
    """

    graph: int
    """A graph of the model that the session began with."""
    session_id: str
    """1 to 128 characters."""
    persist: bool = True
    """The session and its KV state may be written to disk; false is permanent for a session."""
    priority: str = ""
    """The class of the session's turns, and of the wait; empty: the session's, or `normal`."""
    queue_timeout_s: float = 0.0
    """The longest wait for a place; 0: fail at once."""
    from_state: str = ""
    """The name of the [state](#save_state) with which a new session begins, or of a
    [shared](#shared-states) one; an existing session keeps its history.
    """


class ContextResult(Map):
    """A context's handle. `attached` is true if the session existed before, with its history."""

    context: int
    """The handle."""
    attached: bool = False
    """The session existed before and has its history."""


class ContextParams(Map):
    """A call on an execution context."""

    context: int
    """The handle."""


class FinalizeParams(ContextParams):
    """`finalize_execution_context`: delete the context; with `keep`, a session with an id becomes
    dormant instead.
    """

    keep: bool = False
    """Make a session with an id dormant until it is opened again."""


class SetInputParams(ContextParams):
    """`set_input`: at index 1 parameters as JSON, at any other index a prompt."""

    index: int
    """1: parameters; any other: the prompt."""
    tensor: Tensor
    """The bytes."""


class ComputeParams(ScheduledParams):
    """`compute` of the context's input, or of named tensors."""

    context: int
    """The handle."""
    inputs: Annotated[list[tuple[str, Tensor]], msgspec.Meta(max_length=INPUTS_MAX)] | None = None
    """Named tensors; nil: use the inputs from `set_input`."""
    keep: Annotated[list[str], msgspec.Meta(max_length=INPUTS_MAX)] = []
    """With `inputs` of a graph: the names of outputs that [stay](#kept-tensors) in the daemon."""
    outputs: Annotated[list[tuple[str, int, int, int]], msgspec.Meta(max_length=INPUTS_MAX)] = []
    """With `inputs` of a graph: the names of outputs that are written to [buffers](#buffers), each
    with the buffer's handle, the offset of its place, and the bytes that are free there.
    """
    free: Handles = []
    """The handles of kept tensors that are freed before anything else; unknown ones are
    ignored.
    """


class ComputeResult(Map):
    """The named outputs, if named inputs were sent."""

    outputs: list[tuple[str, Tensor]] = []
    """With `inputs`: those of the tensor model; or, with a prompt, one tensor named `output`. It
    has the prompt's type and shape if it has the prompt's length, else type u8.
    """
    metadata: Annotated[Any, Metadata] = {}
    """With `inputs`: the [metadata](#metadata); empty for a graph, which has no turns."""


class FreeTensorsParams(Map):
    """`free_tensors`: free tensors that stay in the daemon."""

    tensors: Handles
    """The handles; unknown ones are ignored."""


class ComputeSingleParams(ScheduledParams):
    """`compute_single`: compute the next token."""

    context: int
    """The handle."""


class ComputeSingleResult(Map):
    """The token's text, which `get_output_single` would also return."""

    piece: bytes = b""
    """The bytes that `get_output_single` would return, which saves that call. Empty while a
    character or a possible stop text is incomplete.
    """


class GetOutputParams(ContextParams):
    """`get_output` and `get_output_single`. An output of more than `size_max` bytes is `TooLarge`
    (−1 for no bound).
    """

    index: int = 0
    """0 or 1, else `NotFound`."""
    size_max: int = -1
    """Size of the caller's buffer in bytes; a longer output is `TooLarge` with `data.needed`,
    and nothing is lost. −1: unlimited.
    """


class OutputResult(Map):
    """Bytes of an output; index 1 is JSON."""

    data: bytes
    """The bytes."""

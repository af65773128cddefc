"""The messages of a channel: a socket between a client and the process of a graph.

They are the calls `compute` and `cancel` of the protocol, in the same frames, with those params
that need no daemon.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

TENSORS_MAX = 128
"""The most tensors of one computation."""
RANK_MAX = 64
"""The most dimensions of a tensor in a channel. As all lengths are bounded, the frames of a channel
are decoded without the walk of `check_shape`.
"""


class ChannelTensor(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor, with the name or number of its type."""

    data: bytes = b""
    dimensions: Annotated[tuple[int, ...], msgspec.Meta(max_length=RANK_MAX)] = ()
    type: int | str = "u8"


class ChannelCompute(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The params of a computation: the named tensors, the class, and the seconds within which it
    has to begin; 0: no bound.
    """

    inputs: Annotated[list[tuple[str, ChannelTensor]], msgspec.Meta(max_length=TENSORS_MAX)]
    priority: str = ""
    queue_timeout_s: float = 0.0


class ChannelCancel(msgspec.Struct, forbid_unknown_fields=True):
    """The params of a cancellation: the number of a computation that was sent before."""

    request: int


class ChannelResult(msgspec.Struct):
    """The result of a computation."""

    outputs: list[tuple[str, ChannelTensor]]


Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Request = tuple[Literal[1], Number, str, msgspec.Raw]
"""Its kind, the number that the client has given it, the call, and the params."""

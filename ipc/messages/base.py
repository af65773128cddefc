"""Base types of all messages, and tensors with wasi-nn's types."""

from __future__ import annotations

from typing import Annotated

import msgspec

TENSOR_BYTES_MAX = 8 << 20
"""Maximum size of a prompt or tensor in a descriptor: 2 million tokens of a usual text."""
TRACEPARENT_CHARACTERS_MAX = 128
_SPAN = "(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
Traceparent = Annotated[
    str,
    msgspec.Meta(
        max_length=TRACEPARENT_CHARACTERS_MAX,
        pattern=rf"^(00-{_SPAN}|(?!00|ff)[0-9a-f]{{2}}-{_SPAN}(-[!-~]*)?)?\Z",
    ),
]
"""The parent span of a call, in the form of W3C Trace Context; empty for none."""


class Map(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message sent as a map. A field that has its default may be omitted."""


class Empty(Map):
    """No fields."""


class ScheduledParams(Map, kw_only=True):
    """Params of a call that the scheduler queues; `priority` is the name of a priority class."""

    priority: str = ""
    """Of the turns that the call begins; empty: the context's, for `resume` the previous one,
    for `embed` normal.
    """
    queue_timeout_s: float = 0.0
    """Each turn that the call begins must begin within this; 0: no bound."""
    timeout_s: float = 0.0
    """Each turn that the call begins must end within this, for `embed` all of them; 0: no bound."""
    traceparent: Traceparent = ""
    """The caller's span; see [traces](#traces)."""


class Tensor(Map):
    """A wasi-nn tensor. `type` is a name or number of
    `backends.tensors.TENSOR_TYPES`; `data` has its bytes.

    A tensor too large for a frame travels in a memfd passed with the frame. Then `fd` is its index
    among the frame's descriptors, and `data` is empty.
    """

    data: bytes = b""
    """The bytes."""
    dimensions: list[int] = []
    """Not checked: of a text only the bytes count."""
    type: int | str = "u8"
    """Name or number of a [tensor type](#wasi-nn-numbers); any number is accepted."""
    fd: int = -1
    """0 or more: the bytes are in a [descriptor](#descriptors), and `data` is empty."""

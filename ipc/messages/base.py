"""Base types of all messages, the first frames of each side, and tensors with wasi-nn's types."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...wire.frames import CREDIT_MAX as CREDIT_MAX
from ...wire.frames import Kind as Kind

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
    for `embed` and `rerank` normal.
    """
    queue_timeout_s: float = 0.0
    """Each turn that the call begins must begin within this; 0: no bound."""
    timeout_s: float = 0.0
    """Each turn that the call begins must end within this, for `embed` and `rerank` all of
    them; 0: no bound."""
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
    """Name or number of a [tensor type](#wasi-nn-numbers); any number is accepted. Some types of
    graphs only have names.
    """
    fd: int = -1
    """0 or more: the bytes are in a [descriptor](#descriptors), and `data` is empty."""
    kept: int = 0
    """Not 0: the handle of a [tensor that stays](#kept-tensors) in the daemon. `data` is empty; an
    input needs no other field.
    """
    buffer: int = 0
    """Not 0: the handle of a [buffer](#buffers) that has the bytes. `data` is empty."""
    offset: int = 0
    """With `buffer`: the place of the first byte, a multiple of 64."""
    length: int = 0
    """With `buffer`: the number of bytes."""


PROTOCOL_VERSION = (1, 1)
"""Major, minor. A peer with another major version is refused."""
CREDIT_DEFAULT = 64
REQUESTS_MAX = 256


class Limits(Map):
    """The bounds that the daemon announces in its hello. `frame_bytes_max` is that of frames to the
    daemon, `reply_bytes_max` that of frames from it.
    """

    frame_bytes_max: int
    """Bytes of the body of a frame to the daemon."""
    reply_bytes_max: int
    """Bytes of the body of a frame to the client."""
    nesting_max: int
    """Levels of a frame's arrays and maps."""
    requests_max: int
    """Running requests of one connection."""
    credit_default: int
    """Credit of a stream whose request sets none."""
    credit_max: int
    """Credit that a request or one credit frame may give."""
    tensor_bytes_max: int
    """Bytes of a prompt or tensor in a descriptor."""
    sessions_max: int
    """Sessions open at once, of all users."""
    idle_timeout_ms: int = 0
    """The idle time after which a context expires; 0: unknown."""


class ClientHello(Map):
    """The client's first frame; `software` is free text for the daemon's log. `label` names a
    guest, an agent or a tenant among the user's programs. A gateway acts `on_behalf_of` a user.
    With `copies` the daemon sends the changes of the connection's sessions with an id. `key` names
    the key of a gateway's caller.
    """

    protocol: tuple[int, int]
    """Major and minor version."""
    software: str = ""
    """Free text for the daemon's log, cut to 200 characters."""
    label: str = ""
    """The [label](#labels) of this program among those of its user."""
    on_behalf_of: str = ""
    """The user on behalf of whom a [gateway](#gateways) acts."""
    copies: bool = False
    """Whether the client gets the [changes of its sessions](#copies-of-sessions)."""
    key: str = ""
    """The name of the key that a gateway's caller has, by which [usage](#usage) is counted."""
    key_limits: dict[str, int] = {}
    """The limits of this key, which hold besides those of the user: a map of `tokens_per_day`,
    `tokens_per_month`, `seconds_per_day` and `seconds_per_month`, of UTC.
    """


class ServerHello(Map):
    """The daemon's first frame. `instance` counts the daemon's starts; it is the upper half of its
    handles.
    """

    protocol: tuple[int, int]
    """Major and minor version."""
    software: str
    """`inferd/` and its version."""
    instance: int
    """Number of daemon starts on this state."""
    limits: Limits
    """The limits in force."""
    llama_build_number: int = 0
    """llama.cpp's build; 0: unknown."""
    llama_commit: str = ""
    """The commit of llama.cpp that the engine is built from."""

"""Messages between the daemon and the process that computes the requests of jobs, in frames of
msgpack. The process keeps nothing: a request that it has not answered is sent again to the next.
"""

from __future__ import annotations

import msgspec

from .names import Priority

REPLY_BYTES_MAX = 64 << 20
"""Bytes of a result, which is at least as long as its text and logprobs."""


class Compute(msgspec.Struct, tag="compute", frozen=True, kw_only=True):
    """Compute the HTTP request of a path and a body under the identity of *user*, as the process
    names it in its hello, with the *key* of a gateway and its limits, if one submitted the job.
    With a *response_id*, the response is streamed and has this id.
    """

    number: int
    user: str
    label: str
    key: str
    key_limits: dict[str, int]
    priority: Priority
    models: list[str] | None
    url: str
    body: bytes
    response_id: str


class Cancel(msgspec.Struct, tag="cancel", frozen=True, kw_only=True):
    """Cancel a request; it has no answer."""

    number: int


class Event(msgspec.Struct, tag="event", frozen=True, kw_only=True):
    """An event of a streamed response, in JSON."""

    number: int
    data: bytes


class Done(msgspec.Struct, tag="done", frozen=True, kw_only=True):
    """The end of a request. A refused one can be sent again after *retry_after_s*, if given."""

    number: int
    status: int
    body: bytes
    retry_after_s: float | None = None


Command = Compute | Cancel
Answer = Event | Done

"""Messages of inferd's own calls on a session: its turn, its history, its parameters."""

from __future__ import annotations

from typing import Any

from .base import Map

__all__ = (
    "CancelParams",
    "CancelResult",
    "DeleteSessionParams",
    "DeleteSessionResult",
    "ForkParams",
    "ForkResult",
    "OptionsParams",
    "ParametersResult",
    "ParkResult",
    "RewindParams",
    "RewindResult",
    "SystemParams",
)


class CancelParams(Map):
    """`cancel`: a request of this connection by its id, or a context's turn by its handle."""

    request: int | None = None
    context: int | None = None


class CancelResult(Map):
    """Whether there was something to cancel."""

    cancelled: bool


class ParkResult(Map):
    """Whether the turn gives way: to others who wait for a slot."""

    parked: bool


class SystemParams(Map):
    """`reset`: empty the history; `system` then is its first message, if given."""

    context: int
    system: str | None = None


class ForkParams(Map):
    """`fork_session`: `n` branches of a context's present state, with ids of their own if given."""

    context: int
    n: int = 1
    session_ids: list[str] = []


class ForkResult(Map):
    """The branches' handles; `cached_tokens` of their `tokens` need not be computed again."""

    contexts: list[int]
    tokens: int = 0
    cached_tokens: int = 0
    kv: str = "cached"


class RewindParams(Map):
    """`rewind`: back by `turns`, or to the first `tokens` tokens; one of both is given."""

    context: int
    turns: int | None = None
    tokens: int | None = None


class RewindResult(Map):
    """The remaining history: `tokens`, of which `cached_tokens` need not be computed again, and
    `turns` that one can still go back.
    """

    tokens: int = 0
    turns: int = 0
    cached_tokens: int = 0
    kv: str = "cached"


class DeleteSessionParams(Map):
    """`delete_session` of a context of this connection, or of a session by its id; not both."""

    context: int | None = None
    session_id: str | None = None


class DeleteSessionResult(Map):
    """Whether there was such a session."""

    deleted: bool


class OptionsParams(Map):
    """`set_options`: what holds for a context's turns from now on."""

    context: int
    options: dict[str, Any] = {}
    priority: str = ""


class ParametersResult(Map):
    """`parameters`: each with `name`, `value` in force, `origin`, `adjusted`."""

    parameters: list[dict[str, Any]]

"""Messages of inferd's own calls on a session: its turn, its history, its parameters."""

from __future__ import annotations

from typing import Annotated, Any

from .base import Map
from .contexts import ContextParams
from .results import DeletionInfo, ParameterInfo, SessionInfo


class CancelParams(Map):
    """`cancel` of a request of this connection by its id, or of a context's turn."""

    request: int | None = None
    context: int | None = None


class CancelResult(Map):
    """Whether there was something to cancel."""

    cancelled: bool


class ParkResult(Map):
    """Whether the turn will be parked, so that a waiting task gets its slot."""

    parked: bool


class SystemParams(ContextParams):
    """`reset`: clear the history; `system` then becomes its first message."""

    system: str | None = None


class ForkParams(ContextParams):
    """`fork_session`: make `n` branches of a context's present state, with `session_ids` if any.

    `priority` is the class of the wait for places; without a `queue_timeout_s` the call does not
    wait.
    """

    n: int = 1
    session_ids: list[str] = []
    priority: str = ""
    queue_timeout_s: float = 0.0


class ForkResult(Map):
    """The branches' handles; `cached_tokens` of their `tokens` need not be computed again."""

    contexts: list[int]
    tokens: int = 0
    cached_tokens: int = 0
    kv: str = "cached"


class RewindParams(ContextParams):
    """`rewind` by `turns`, or to the first `tokens` tokens; one of the two is set."""

    turns: int | None = None
    tokens: int | None = None


class RewindResult(Map):
    """The remaining history: its `tokens`, of which `cached_tokens` need not be computed again, and
    the `turns` that can still be dropped.
    """

    tokens: int = 0
    turns: int = 0
    cached_tokens: int = 0
    kv: str = "cached"


class HistoryParams(Map):
    """`history` of a context of this connection, or of a session by its id; not both."""

    context: int | None = None
    session_id: str | None = None


class HistoryResult(Map):
    """The chat's `messages` with the answer so far, and the `session` as `sessions` describes it.
    `turns` has the number of messages before each turn that can be rewound, `note` the bytes that
    `set_options` has stored with the session, and `options` the session's own parameters.
    """

    messages: list[dict[str, Any]]
    turns: list[int]
    session: Annotated[Any, SessionInfo]
    note: bytes = b""
    options: dict[str, Any] = {}


class DeleteSessionParams(Map):
    """`delete_session` of a context of this connection, or of a session by its id; not both.

    A session that is deleted by its id can be restored for `undo_s` seconds.
    """

    context: int | None = None
    session_id: str | None = None
    undo_s: float = 0.0


class DeleteSessionResult(Map):
    """Whether there was such a session."""

    deleted: bool


class SessionIdParams(Map):
    """A session by its id."""

    session_id: str


class SessionResult(Map):
    """A session, as `sessions` describes it."""

    session: Annotated[Any, SessionInfo]


class UpdateSessionParams(Map):
    """`update_session`, open or dormant, by its id: its title, whether it is kept, the priority of
    its turns, and its own parameters, of which `unset` are removed. Nil leaves a value as it is.
    """

    session_id: str
    title: str | None = None
    kept: bool | None = None
    priority: str = ""
    options: dict[str, Any] = {}
    unset: list[str] = []


class ListDeletionsParams(Map):
    """`list_deletions`; with `clear` the notes are deleted."""

    clear: bool = False


class ListDeletionsResult(Map):
    """The sessions that the daemon has deleted by itself, the latest first."""

    deletions: list[Annotated[Any, DeletionInfo]]


class OptionsParams(ContextParams):
    """`set_options`: set parameters and the priority of a context's next turns, and its `note`.

    With nil the note stays as it is; an empty one deletes it.
    """

    options: dict[str, Any] = {}
    priority: str = ""
    note: bytes | None = None


class ParametersResult(Map):
    """The parameters in force, each with `name`, `value`, `origin` and `adjusted`."""

    parameters: list[Annotated[Any, ParameterInfo]]

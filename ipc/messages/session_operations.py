"""Messages of inferd's own calls on a session: its turn, its history, its parameters."""

from __future__ import annotations

from typing import Annotated, Any

from .base import Map
from .contexts import ContextParams
from .results import DeletionInfo, ParameterInfo, SessionInfo, StateInfo


class CancelParams(Map):
    """`cancel` of a request of this connection by its id, or of a context's turn."""

    request: int | None = None
    """A request's id on this connection."""
    context: int | None = None
    """A context of this user, or for an operator of any user; give either `request` or
    `context`.
    """


class CancelResult(Map):
    """Whether there was something to cancel."""

    cancelled: bool
    """Whether a turn or request was cancelled."""


class ParkResult(Map):
    """Whether the turn will be parked, so that a waiting task gets its slot."""

    parked: bool
    """Whether the turn yields; false also if there is no turn, or no memory for its state."""


class EndReasoningResult(Map):
    """Whether the answer begins now, instead of more reasoning."""

    ended: bool
    """Whether the present thought ends: its end is added to the answer at the next whole character,
    behind the `reasoning-budget-message`.
    """
    reason: str = ""
    """The reason why it does not end. `no_turn`: no turn is under way. `not_reasoning`: its answer
    does not reason, or no longer. `refused_by_grammar`: its grammar does not allow the end here.
    `no_worker`: it waits for a place, or its worker is being replaced; try again.
    """


class SystemParams(ContextParams):
    """`reset`: clear the history; `system` then becomes its first message."""

    system: str | None = None
    """The first message of the new history, by the chat template."""


class ForkParams(ContextParams):
    """`fork_session`: make `n` branches of a context's present state, with `session_ids` if any.

    `priority` is the class of the wait for places; without a `queue_timeout_s` the call does not
    wait.
    """

    n: int = 1
    """Number of branches, 1 … 16."""
    session_ids: list[str] = []
    """An id for each branch, all different and not in use; empty: the branches have no id."""
    priority: str = ""
    """The class of the wait for places; empty: the context's."""
    queue_timeout_s: float = 0.0
    """The longest wait for places; 0: fail at once."""


class ForkResult(Map):
    """The branches' handles; `cached_tokens` of their `tokens` need not be computed again."""

    contexts: list[int]
    """The branches' handles."""
    tokens: int = 0
    """Tokens of the history."""
    cached_tokens: int = 0
    """Tokens of the history that a branch currently need not compute again."""
    kv: str = "cached"
    """As in `rewind`."""


class RewindParams(ContextParams):
    """`rewind` by `turns`, or to the first `tokens` tokens; one of the two is set."""

    turns: int | None = None
    """Go back this many turns, 1 or more; the last 1000 are remembered."""
    tokens: int | None = None
    """Keep this many tokens, 0 or more."""


class RewindResult(Map):
    """The remaining history: its `tokens`, of which `cached_tokens` need not be computed again, and
    the `turns` that can still be dropped.
    """

    tokens: int = 0
    """Tokens left in the history."""
    turns: int = 0
    """Turns that can still be removed."""
    cached_tokens: int = 0
    """Tokens of the history that currently need not be computed again."""
    kv: str = "cached"
    """`cached`, or `recomputed`: the next turn computes more than the last token of the history
    again.
    """


class HistoryParams(Map):
    """`history` of a context of this connection, or of a session by its id; not both."""

    context: int | None = None
    """A context of this connection."""
    session_id: str | None = None
    """A session by its id."""


class HistoryResult(Map):
    """The chat's `messages` with the answer so far, and the `session` as `sessions` describes it.
    `turns` has the number of messages before each turn that can be rewound, `note` the bytes that
    `set_options` has stored with the session, and `options` the session's own parameters.
    """

    messages: list[dict[str, Any]]
    """The [messages](#messages-of-a-chat), with the answer of a turn under way so far; empty if
    the history is raw text. A message that the model no longer reads, because the [context was
    full](scheduling.md#a-full-context), has `dropped: true`.
    """
    turns: list[int]
    """For each turn that [`rewind`](#rewind) can remove, the number of messages before it, the
    latest turn last.
    """
    session: Annotated[Any, SessionInfo]
    """The session, as [`sessions`](#sessions) describes it."""
    note: bytes = b""
    """The note that [`set_options`](#set_options) has stored."""
    options: dict[str, Any] = {}
    """The session's own parameters, as `set_options` and [`update_session`](#update_session)
    have set them.
    """


class SessionMediaParams(Map, kw_only=True):
    """`session_media` of a context of this connection, or of a session by its id; not both."""

    context: int | None = None
    """A context of this connection."""
    session_id: str | None = None
    """A session by its id."""
    sha256: str
    """The hash of an image or a sound in the session's messages, as [`history`](#history) has
    it.
    """
    offset: int = 0
    """The first byte to return."""


class SessionMediaResult(Map):
    """A part of a content, from `offset` on; all of it has `size` bytes."""

    data: bytes
    """At most `PART_BYTES` from `offset` on; empty at the end."""
    size: int
    """Bytes of the whole content."""
    media_type: str = ""
    """Its type, such as `image/png`."""


class DeleteSessionParams(Map):
    """`delete_session` of a context of this connection, or of a session by its id; not both.

    A session that is deleted by its id can be restored for `undo_s` seconds.
    """

    context: int | None = None
    """A context of this connection."""
    session_id: str | None = None
    """A session of this user and [label](#labels)."""
    undo_s: float = 0.0
    """With a `session_id`: seconds in which [`restore_session`](#restore_session) restores it,
    up to 3600.
    """


class DeleteSessionResult(Map):
    """Whether there was such a session."""

    deleted: bool
    """Whether there was such a session."""


class SessionIdParams(Map):
    """A session by its id."""

    session_id: str
    """The session."""


class SessionResult(Map):
    """A session, as `sessions` describes it."""

    session: Annotated[Any, SessionInfo]
    """The session, as [`sessions`](#sessions) describes it."""


class UpdateSessionParams(Map):
    """`update_session`, open or dormant, by its id: its title, whether it is kept, the priority of
    its turns, and its own parameters, of which `unset` are removed. Nil leaves a value as it is.
    """

    session_id: str
    """The session."""
    title: str | None = None
    """Its title, up to 200 characters; empty: the first words of its first message; nil:
    unchanged.
    """
    kept: bool | None = None
    """Whether it is kept: it is then not deleted while it is dormant; nil: unchanged."""
    priority: str = ""
    """Of its turns from now on; empty: unchanged."""
    options: dict[str, Any] = {}
    """[parameters](#parameters), as in [`set_options`](#set_options)."""
    unset: list[str] = []
    """Parameters that lose the session's own value."""


class ListDeletionsParams(Map):
    """`list_deletions`; with `clear` the notes are deleted."""

    clear: bool = False
    """Delete the notes that are returned."""


class ListDeletionsResult(Map):
    """The sessions that the daemon has deleted by itself, the latest first."""

    deletions: list[Annotated[Any, DeletionInfo]]
    """One note each."""


class OptionsParams(ContextParams):
    """`set_options`: set parameters and the priority of a context's next turns, and its `note`.

    With nil the note stays as it is; an empty one deletes it.
    """

    options: dict[str, Any] = {}
    """[parameters](#parameters); unknown keys are `InvalidArgument`."""
    priority: str = ""
    """Of the context's turns from now on; empty: unchanged."""
    note: bytes | None = None
    """Bytes of the client's own, up to 256 KiB, which stay with the session as long as it
    exists; [`history`](#history) returns them. Branches and named states have none. Empty: none;
    nil: unchanged.
    """


class ParametersResult(Map):
    """The parameters in force, each with `name`, `value`, `origin` and `adjusted`."""

    parameters: list[Annotated[Any, ParameterInfo]]
    """One parameter each."""


class SaveStateParams(ContextParams):
    """`save_state`: save a context's present state under a name of the user's own, of 1 to 128
    characters; `replace` permits that the name is in use.
    """

    name: str
    """1 to 128 characters; of this user and [label](#labels)."""
    replace: bool = False
    """The state replaces one that has the name."""


class SaveStateResult(Map):
    """The saved history: its `tokens`, of which `stored_tokens` have their KV state on disk."""

    tokens: int = 0
    """Tokens of the history."""
    stored_tokens: int = 0
    """Tokens whose KV state is on disk; 0: they are computed again when they are needed."""


class ListStatesResult(Map):
    """The user's named states, each with `name`, `model`, `tokens` and more, and those of other
    users that access rules share: they have `shared_by`.
    """

    states: list[Annotated[Any, StateInfo]]
    """One state each: the caller's by their names, then those that access rules
    [share](#shared-states) with the caller.
    """


class DeleteStateParams(Map):
    """`delete_state` by its name."""

    name: str
    """A state of this user and [label](#labels)."""


class DeleteStateResult(Map):
    """Whether there was such a state."""

    deleted: bool
    """Whether there was such a state."""

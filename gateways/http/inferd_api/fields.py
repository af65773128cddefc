"""The fields of the requests of the daemon's own paths."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from ....ipc.names import Priority
from ..fields import FieldTable, honoured

SESSIONS_MAX = 1000
UNDO_S_MAX = 3600
SessionId = Annotated[str, Meta(min_length=1, max_length=128)]


class ListQuery(Struct, kw_only=True):
    """The part of the list of sessions that is requested."""

    limit: Annotated[int, Meta(ge=1, le=SESSIONS_MAX)] = 100
    after: SessionId | None = None
    search: str = ""
    prefix: str = ""


class UsageQuery(Struct, kw_only=True):
    """The usage that is requested."""

    by: str = "model"
    since: str = "7d"
    all: bool = False


class DeleteQuery(Struct, kw_only=True):
    """The seconds in which a session can be restored after its deletion."""

    undo: Annotated[float, Meta(ge=0, le=UNDO_S_MAX)] = 0.0


class Update(Struct, kw_only=True):
    """A change of a session."""

    title: str | None = None
    kept: bool | None = None
    priority: Priority | None = None


class NewSession(Struct, kw_only=True):
    """A session to create."""

    model: str
    title: str | None = None
    id: SessionId | None = None
    system: str | None = None
    priority: Priority | None = None


class Fork(Struct, kw_only=True):
    """A branch to create."""

    id: SessionId | None = None
    messages: Annotated[int, Meta(ge=0)] | None = None


class Rewind(Struct, kw_only=True):
    """The messages to keep, or the turns to remove."""

    messages: Annotated[int, Meta(ge=0)] | None = None
    turns: Annotated[int, Meta(ge=1)] | None = None


class Nothing(Struct):
    """A request without fields."""


class EventsQuery(Struct, kw_only=True):
    """The kinds of events that are requested."""

    include: str | None = None


class TurnEventsQuery(Struct, kw_only=True):
    """The event after which the rest of a turn is requested."""

    after: str | None = None


class Load(Struct, kw_only=True):
    """A model to load."""

    model: str
    stream: bool = False


class Unload(Struct, kw_only=True):
    """A model to unload."""

    model: str
    force: bool = False


class Swap(Struct, kw_only=True):
    """A model to replace by another."""

    model: str
    to: str
    mode: Literal["migrate", "drain"] = "migrate"
    force: bool = False


_SESSIONS = "/v1/inferd/sessions"
_MODELS = "/v1/inferd/models"
_MESSAGES = "the number of messages to keep, one of the session's `boundaries`"

LIST = FieldTable(
    _SESSIONS,
    [
        honoured("limit", f"1 to {SESSIONS_MAX}, the default is 100"),
        honoured("after", "the id of the last session on the previous page"),
        honoured("search", "a part of the title or the first message, in any case"),
        honoured("prefix", "the beginning of the ids"),
    ],
    kind=ListQuery,
    own_path=True,
    method="GET",
)
USAGE = FieldTable(
    "/v1/inferd/usage",
    [
        honoured("by", "columns such as `model,day`; the default is `model`"),
        honoured("since", "the last time, such as `24h` or `30d`; the default is `7d`"),
        honoured("all", "true: the usage of all users, for an operator"),
    ],
    kind=UsageQuery,
    own_path=True,
    method="GET",
)
UPDATE = FieldTable(
    f"{_SESSIONS}/{{session:path}}",
    [
        honoured("title", "up to 200 characters; an empty one is the first words of the chat"),
        honoured("kept", "true: the session is not deleted by itself"),
        honoured("priority", "the class of its turns that name none"),
    ],
    kind=Update,
    own_path=True,
    parameters=True,
    method="PATCH",
)
DELETE = FieldTable(
    f"{_SESSIONS}/{{session:path}}",
    [honoured("undo", f"seconds in which it can be restored, 0 to {UNDO_S_MAX}; the default is 0")],
    kind=DeleteQuery,
    own_path=True,
    method="DELETE",
)
RESTORE = FieldTable(f"{_SESSIONS}/{{session:path}}/restore", [], kind=Nothing, own_path=True)
CREATE = FieldTable(
    _SESSIONS,
    [
        honoured("model"),
        honoured("id", "1 to 128 characters; the default is a random one"),
        honoured("title", "up to 200 characters; the default is the first words of the chat"),
        honoured("system", "the system prompt, the first message of the history"),
        honoured("priority", "the class of its turns that name none; the default is `normal`"),
    ],
    kind=NewSession,
    own_path=True,
    parameters=True,
)
FORK = FieldTable(
    f"{_SESSIONS}/{{session:path}}/fork",
    [
        honoured("id", "that of the branch; the default is a random one"),
        honoured("messages", f"{_MESSAGES}; the default is all"),
    ],
    kind=Fork,
    own_path=True,
)
REWIND = FieldTable(
    f"{_SESSIONS}/{{session:path}}/rewind",
    [
        honoured("messages", _MESSAGES),
        honoured("turns", "instead of `messages`: the number of turns to remove"),
    ],
    kind=Rewind,
    own_path=True,
)
CANCEL = FieldTable(f"{_SESSIONS}/{{session:path}}/cancel", [], kind=Nothing, own_path=True)
END_REASONING = FieldTable(
    f"{_SESSIONS}/{{session:path}}/end-reasoning", [], kind=Nothing, own_path=True
)
TURN_EVENTS = FieldTable(
    f"{_SESSIONS}/{{session:path}}/events",
    [honoured("after", "the id of the last event that was read, as the header `Last-Event-ID`")],
    kind=TurnEventsQuery,
    own_path=True,
    method="GET",
)
LOAD = FieldTable(
    f"{_MODELS}/load",
    [honoured("model"), honoured("stream", "true: events of the progress")],
    kind=Load,
    own_path=True,
)
UNLOAD = FieldTable(
    f"{_MODELS}/unload",
    [honoured("model"), honoured("force", "true: end the turns of a model in use")],
    kind=Unload,
    own_path=True,
)
SWAP = FieldTable(
    f"{_MODELS}/swap",
    [
        honoured("model", "the name that gets another model"),
        honoured("to", "the other model's name, or `model` itself to end a swap"),
        honoured("mode", "`migrate`: load it beside the old one; `drain`: in its place"),
        honoured("force", "true: also put an encoder in place of a model that generates text"),
    ],
    kind=Swap,
    own_path=True,
)
EVENTS = FieldTable(
    "/v1/inferd/events",
    [honoured("include", "the kinds of events, such as `queue,models`; the default is all")],
    kind=EventsQuery,
    own_path=True,
    method="GET",
)

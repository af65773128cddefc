"""Messages of calls on the daemon itself: lists, statistics, log levels, draining."""

from __future__ import annotations

from typing import Annotated, Any

from .base import Map
from .results import SessionInfo, Stats, TaskInfo


class QueueParams(Map):
    """`queue`; with `all` (right `see-all`) the result has the tasks of all users."""

    all: bool = False


class SessionsParams(Map):
    """`sessions`; `dormant` adds dormant sessions, `all` (right `see-all`) those of all users.

    With a `session_id`, only sessions with this id are listed, and with `search` those whose title
    or first message has this text.
    """

    dormant: bool = False
    all: bool = False
    session_id: str | None = None
    search: str = ""


class SessionsResult(Map):
    """A map for each session; the number of dormant sessions of all users, without kept ones, and
    the number and the age past which they are deleted.
    """

    sessions: list[Annotated[Any, SessionInfo]]
    dormant_sessions: int = 0
    dormant_sessions_max: int = 0
    dormant_s_max: float = 0.0


class QueueResult(Map):
    """A map for each waiting or running task."""

    tasks: list[Annotated[Any, TaskInfo]]


class StatsResult(Map):
    """The daemon's statistics."""

    stats: Annotated[Any, Stats]


class MetricsResult(Map):
    """All metrics in Prometheus's text format."""

    text: str


class LogLevelParams(Map):
    """`log_level`: the levels to set, by logger."""

    levels: dict[str, str] = {}


class LogLevelResult(Map):
    """The level of each logger."""

    levels: dict[str, str]


class DrainParams(Map):
    """`drain`: finish running turns and accept nothing new; with `stop` the daemon then exits.

    In a fleet, only a `node` is drained: its sessions move to other nodes, with a wait of at most
    `wait_s` for its turns. With `undo` the node is used again.
    """

    stop: bool = False
    node: str = ""
    undo: bool = False
    wait_s: float = 0.0


class DrainResult(Map):
    """With `node`: the number of sessions that have moved, and the first ones that stay, each with
    the `error`.
    """

    moved: int = 0
    staying: list[dict[str, Any]] = []

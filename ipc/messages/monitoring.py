"""Messages of calls on the daemon itself: lists, statistics, log levels, draining."""

from __future__ import annotations

from typing import Annotated, Any

from .base import Map
from .results import SessionInfo, Stats, TaskInfo, UsageInfo


class QueueParams(Map):
    """`queue`; with `all` (right `see-all`) the result has the tasks of all users."""

    all: bool = False
    """The turns of all users: requires the right [*see-all*](#access-rights), else
    `PermissionDenied`.
    """


class SessionsParams(Map):
    """`sessions`; `dormant` adds dormant sessions, `all` (right `see-all`) those of all users.

    With a `session_id`, only sessions with this id are listed, and with `search` those whose title
    or first message has this text.
    """

    dormant: bool = False
    """Include dormant sessions: after the others, the longest dormant first."""
    all: bool = False
    """The sessions of all users: requires the right [*see-all*](#access-rights), else
    `PermissionDenied`.
    """
    session_id: str | None = None
    """Only the sessions with this id."""
    search: str = ""
    """Only the sessions whose title or first message has this text, in any case; up to 200
    characters. Of a first message, the first 300 characters count. Other users' sessions are not
    searched.
    """


class SessionsResult(Map):
    """A map for each session; the number of dormant sessions of all users, without kept ones, and
    the number and the age past which they are deleted.
    """

    sessions: list[Annotated[Any, SessionInfo]]
    """One session each."""
    dormant_sessions: int = 0
    """The number of all users' dormant sessions that are not kept, and of open ones without a
    place.
    """
    dormant_sessions_max: int = 0
    """The number past which the longest dormant sessions are deleted."""
    dormant_s_max: float = 0.0
    """The age past which they are deleted."""


class QueueResult(Map):
    """A map for each waiting or running task."""

    tasks: list[Annotated[Any, TaskInfo]]
    """One turn each."""


class UsageParams(Map):
    """`usage`; with `all` (right `see-all`) the result has the usage of all users."""

    by: list[str] = []
    """The columns to group by: `user`, `model`, `label`, `key`, and `hour` or `day`; without any,
    the result is one sum.
    """
    since_s: float = 604_800.0
    """The usage of the last seconds, from the beginning of an hour on."""
    all: bool = False
    """The usage of all users: requires the right [*see-all*](#access-rights), else
    `PermissionDenied`.
    """


class UsageResult(Map):
    """The sums of usage, in the order of the columns that were requested."""

    usage: list[Annotated[Any, UsageInfo]]
    """One group each; groups without any usage are left out."""
    since: float = 0.0
    """The time from which usage counts, in seconds since 1970."""
    limits: list[dict[str, Any]] = []
    """Without `all`: the limits of the caller's user and key, each a map of `bound` (its setting),
    `used`, `limit` and `ends_at` (seconds since 1970).
    """


class StatsResult(Map):
    """The daemon's statistics."""

    stats: Annotated[Any, Stats]
    """The daemon's statistics."""


class MetricsResult(Map):
    """All metrics in Prometheus's text format."""

    text: str
    """All metrics in Prometheus's text format."""


class LogLevelParams(Map):
    """`log_level`: the levels to set, by logger."""

    levels: dict[str, str] = {}
    """The lowest level that is logged, by logger; other loggers keep theirs."""


class LogLevelResult(Map):
    """The level of each logger."""

    levels: dict[str, str]
    """The levels of all loggers now in force."""


class DrainParams(Map):
    """`drain`: finish running turns and accept nothing new; with `stop` the daemon then exits.

    In a fleet, only a `node` is drained: its sessions move to other nodes, with a wait of at most
    `wait_s` for its turns. With `undo` the node is used again.
    """

    stop: bool = False
    """Reply at once, and exit when the turns have ended; else reply when they have ended."""
    node: str = ""
    """Only in a [fleet](fleet.md#draining-a-node): give this node no new contexts, and move its
    sessions to other nodes; a daemon refuses it with `InvalidArgument`.
    """
    undo: bool = False
    """Use the `node` again."""
    wait_s: float = 0.0
    """With `node`: how long to wait for turns under way there."""


class DrainResult(Map):
    """With `node`: the number of sessions that have moved, and the first ones that stay, each with
    the `error`.
    """

    moved: int = 0
    """With `node`: sessions that have moved."""
    staying: list[dict[str, Any]] = []
    """With `node`: the first 1000 sessions that stay there, each with `session_id`, `user`,
    `label`, `model` and `error`.
    """

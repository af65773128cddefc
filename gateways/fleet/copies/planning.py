"""The work on copies after nodes were lost or found: which to delete, and which to make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ..draining.moves import COPY, Listed
from ..entry.placing.homes import FleetUser, SessionKey
from .table import CopyPlace

_ELSEWHERE = (COPY, "arriving", "departed")
PlaceOf: TypeAlias = Callable[[SessionKey], CopyPlace | None]


class ListedCopy(NamedTuple):
    """A copy in the list of a node."""

    key: SessionKey
    place: CopyPlace
    progress: tuple[int, int]
    """The turns and tokens of the session in the copy."""


class ListedSession(NamedTuple):
    """A session in the list of a node."""

    key: SessionKey
    node: str
    is_dormant: bool
    turns: int


def copy_key(session: Mapping[str, Any]) -> SessionKey:
    """Return the key of a session in a list of a node, by its owner as a client of the entry."""
    owner = FleetUser(session["on_behalf_of"], session["label"])
    return SessionKey(owner, session["session_id"])


def listed_copies(listed: Listed) -> list[ListedCopy]:
    """Return the copies on all nodes."""
    return [
        ListedCopy(
            copy_key(session),
            CopyPlace(
                session["transfer"]["peer"],
                node,
                session["transfer"]["id"],
                number=-1,
                model=session["model"],
            ),
            (session["turns"], session["tokens"]),
        )
        for node, result in listed.items()
        for session in result["sessions"]
        if session["state"] == COPY
    ]


def listed_sessions(listed: Listed) -> list[ListedSession]:
    """Return the sessions with an id that are on a node, open or dormant."""
    return [
        ListedSession(copy_key(session), node, session["state"] == "dormant", session["turns"])
        for node, result in listed.items()
        for session in result["sessions"]
        if session["session_id"] and session["state"] not in _ELSEWHERE
    ]


def newest_copies(copies: list[ListedCopy]) -> dict[SessionKey, ListedCopy]:
    """Return, for each session, the copy with the most turns and, of these, the most tokens."""
    newest: dict[SessionKey, ListedCopy] = {}
    for copy in copies:
        before = newest.get(copy.key)
        if before is None or copy.progress > before.progress:
            newest[copy.key] = copy
    return newest


def stale_copies(
    copies: list[ListedCopy],
    sessions: list[ListedSession],
    place_of: PlaceOf,
    *,
    all_listed: bool,
) -> list[ListedCopy]:
    """Return the copies to delete: those that are not the known copy of their session, and, if all
    nodes were queried (*all_listed*), those whose session is on no node.
    """
    present = {session.key for session in sessions}
    stale = []
    for copy in copies:
        known = place_of(copy.key)
        is_other = known is not None and known.follower != copy.place.follower
        if is_other or (all_listed and copy.key not in present):
            stale.append(copy)
    return stale


def missing_copies(
    sessions: list[ListedSession],
    copies: list[ListedCopy],
    place_of: PlaceOf,
    is_usable: Callable[[CopyPlace], bool],
) -> list[ListedSession]:
    """Return the dormant sessions without a copy of all their turns at a node that may have it.
    Open sessions send theirs with the next change.
    """
    missing = []
    turns = {(copy.key, copy.place.follower): copy.progress[0] for copy in copies}
    for session in sessions:
        place = place_of(session.key)
        is_copied = place is not None and place.home == session.node and is_usable(place)
        if session.is_dormant and place is not None and is_copied and place.is_current:
            # Programs on the node itself may have used it, or the entry while it made no copies.
            is_copied = turns.get((session.key, place.follower)) in (None, session.turns)
        else:
            is_copied = False
        if session.is_dormant and not is_copied:
            missing.append(session)
    return missing

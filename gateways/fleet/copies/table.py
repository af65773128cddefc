"""The known copies of sessions, the choice of the nodes that keep them, and the repairs due."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ..nodes.moves import COPY, Listed
from ..routing.choice import fits
from ..routing.homes import FleetUser, SessionKey
from ..routing.loads import NodeLoad

COPIES_MAX = 100_000


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """The copy of a session: the node that has the session, the one that has the copy, the stream
    and the number of the last change in it.
    """

    home: str
    follower: str
    stream: str
    number: int = 0
    model: str = ""
    is_current: bool = True
    """Whether the copy has all acknowledged changes."""


class CopyTable:
    """The places of copies by session. Owned by the entry's event loop."""

    def __init__(self) -> None:
        self._places: dict[SessionKey, CopyPlace] = {}
        self.counts = Counter[str]()
        """The numbers of copies by the node that has them."""

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[tuple[SessionKey, CopyPlace]]:
        return iter(list(self._places.items()))

    def find(self, key: SessionKey) -> CopyPlace | None:
        return self._places.get(key)

    def put(self, key: SessionKey, place: CopyPlace) -> None:
        self.drop(key)
        self._places[key] = place
        self.counts[place.follower] += 1

    def drop(self, key: SessionKey) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self.counts[place.follower] -= 1

    @property
    def is_full(self) -> bool:
        """Whether no further copy can be noted."""
        return len(self._places) >= COPIES_MAX


def choose_follower(
    model: str,
    home: str,
    loads: Mapping[str, NodeLoad],
    copies: Mapping[str, int],
    excluded: Collection[str] = (),
) -> str | None:
    """Return the node for a copy of a session of *model* on *home*; None: no node can take it.

    Nodes with memory for the model are preferred, then those that have loaded it, then those with
    the fewest *copies*.
    """
    candidates = [name for name in loads if may_follow(name, model, home, loads, excluded)]
    return min(candidates, key=lambda name: _rank(name, model, loads, copies), default=None)


def may_follow(
    node: str,
    model: str,
    home: str,
    loads: Mapping[str, NodeLoad],
    excluded: Collection[str] = (),
) -> bool:
    """Return whether a node may have the copy of a session of *model* on *home*."""
    load = loads.get(node)
    if load is None or load.draining or node == home or node in excluded:
        return False
    return not model or model in load.models


def _rank(
    name: str, model: str, loads: Mapping[str, NodeLoad], copies: Mapping[str, int]
) -> tuple[bool, bool, int, str]:
    load = loads[name].models.get(model)
    return (
        load is not None and not fits(loads[name], load),
        load is not None and not load.loaded,
        copies.get(name, 0),
        name,
    )


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

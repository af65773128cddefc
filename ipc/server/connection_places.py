"""The places for connections: the decision which connection gets one, and which one is closed."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from ...backends.errors import Busy
from .fairness import SharedLimit

OPERATOR_PLACES = 8
"""Places that stay free for operators: root, the daemon's own user, users who may manage models.
At most an eighth of the places, so that a small maximum still serves users.
"""
PLACES_FACTOR = 7
"""A user may have seven times as many connections as are free, so at most seven eighths of all."""
RATIO_MIN = 2
"""A connection is closed in favour of a user with at most half as many connections. Otherwise two
users could close each other's connections in turn.
"""
RETRY_AFTER_S = 1.0


class PlaceHolder(Protocol):
    """The holder of a place: a connection."""

    @property
    def uid(self) -> int:
        """The user."""

    @property
    def is_operator(self) -> bool:
        """Whether the user may take the places that are reserved for operators."""

    @property
    def idle_since_s(self) -> float | None:
        """The time of the last request's end; None while a request is in flight."""


H = TypeVar("H", bound=PlaceHolder)


class Places(Generic[H]):
    """The open connections, and the bound on their number. Decisions are synchronous."""

    def __init__(self, connections_max: int):
        self.holders: set[H] = set()
        self._shares = SharedLimit(0, PLACES_FACTOR)
        self.connections_max = connections_max

    @property
    def connections_max(self) -> int:
        """The maximum number of open connections."""
        return self._connections_max

    @connections_max.setter
    def connections_max(self, connections_max: int) -> None:
        self._connections_max = connections_max
        reserved = min(OPERATOR_PLACES, connections_max // OPERATOR_PLACES)
        self._shares.total_max = connections_max - reserved

    def take_place(self, newcomer: H) -> H | None:
        """Give a connection a place; return the connection to close for it, if there is one.

        :raises Busy: the user may take no free place, and no connection may be closed for this one.
        """
        closed = None
        if not self._is_free_for(newcomer):
            closed = self._closable_for(newcomer)
            if closed is None:
                raise self._full(newcomer)
            self.release_place(closed)
        self.holders.add(newcomer)
        self._shares.take_amount(newcomer.uid, 1)
        return closed

    def release_place(self, holder: H) -> None:
        """Free the place of a connection, if it has one."""
        if holder in self.holders:
            self.holders.remove(holder)
            self._shares.take_amount(holder.uid, -1)

    def _is_free_for(self, newcomer: H) -> bool:
        if newcomer.is_operator:
            return self._shares.total < self.connections_max
        return self._shares.fits(newcomer.uid, 1)

    def _closable_for(self, newcomer: H) -> H | None:
        """Return the connection that has been without a request for longest, of the user who has
        the most connections among those with such connections.
        """
        held_by = self._shares.held_by
        held_min = RATIO_MIN * (held_by(newcomer.uid) + 1)
        if self._shares.largest < held_min:  # settles the usual refusal without a search
            return None
        closable = [
            (-held_by(holder.uid), holder.idle_since_s, holder)
            for holder in self.holders
            if holder.idle_since_s is not None
            and held_by(holder.uid) >= held_min
            and (newcomer.is_operator or not holder.is_operator)
        ]
        return min(closable, key=lambda one: one[:2], default=(0, 0.0, None))[2]

    def _full(self, newcomer: H) -> Busy:
        own = self._shares.held_by(newcomer.uid)
        return Busy(
            f"user {newcomer.uid} has {own} connections, and none of the {self.connections_max}"
            " places is free for another one of this user",
            hint="share connections, or close those that are not needed; the operator can raise"
            " connections-max",
            data=self._data(own),
        )

    def closed_for_another(self, holder: H) -> Busy:
        """Return the error for a connection that `take_place` returned."""
        return Busy(
            "the connection had no request, and its place was needed for another user",
            hint="connect again for the next request, and keep fewer connections open",
            data=self._data(self._shares.held_by(holder.uid)),
        )

    def _data(self, own: int) -> dict[str, float]:
        return {
            "connections_max": self.connections_max,
            "connections": own,
            "retry_after_s": RETRY_AFTER_S,
        }

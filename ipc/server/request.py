"""A call under way, as its implementation in the daemon sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import anyio

from ...scheduler.owner import Owner
from ..messages import CALLS, CREDIT_MAX, Kind
from .request_bytes import Charge
from .server_connection import ServerConnection

_EVENT = int(Kind.EVENT)
"""A plain integer, as msgspec's look-up of an enum's value takes a third of encoding an event."""


class Request:
    """A call under way. `cancelled_data` becomes the data of its error if it is cancelled."""

    def __init__(self, connection: ServerConnection, number: int, call: str, params: Any):
        self.connection, self.number, self.call, self.params = connection, number, call, params
        self.row = CALLS[call]
        self.uid = connection.uid
        self.descriptors: list[int] = []
        """Descriptors passed with the frame. They are closed with the request, except those that
        the call takes.
        """
        self.cancelled_data: dict[str, Any] = {}
        self._early_credit = 0
        """Credit that the client has granted before the call's turn began."""
        self._add_credit: Callable[[int], None] | None = None

    @cached_property
    def scope(self) -> anyio.CancelScope:
        """The scope in which the call runs, unless it runs at once."""
        return anyio.CancelScope()

    @cached_property
    def charge(self) -> Charge:
        """Its memory, counted for the user on whose behalf the connection acts now. A request that
        runs at once is not counted.
        """
        return Charge(self.connection.request_bytes, self.connection.owner.user)

    @property
    def owner(self) -> Owner:
        """The owner of the objects that the call makes."""
        return self.connection.owner

    def grant_credit(self, events: int) -> None:
        """Grant the call's turn at most `CREDIT_MAX` more events; keep them until it begins."""
        events = max(0, min(events, CREDIT_MAX))
        if self._add_credit is None:
            self._early_credit = min(self._early_credit + events, CREDIT_MAX)
        else:
            self._add_credit(events)

    def pass_credit_to(self, add_credit: Callable[[int], None]) -> None:
        """Call *add_credit* with all credit that the client has granted and will grant."""
        self._add_credit = add_credit
        if self._early_credit:
            add_credit(self._early_credit)

    def close(self) -> None:
        """Close the descriptors that came with the request, and count its memory no more."""
        self.params = None  # a reference cycle may keep the request until a collection
        if "charge" in vars(self):
            self.charge.end()
        self.close_descriptors(tuple(self.descriptors))

    def close_descriptors(self, descriptors: Sequence[int]) -> None:
        """Close some of the request's descriptors, which the call no longer needs."""
        for descriptor in descriptors:
            self.descriptors.remove(descriptor)
        self.connection.user.close(descriptors)

    def take_descriptor(self, descriptor: int) -> None:
        """Keep a descriptor open after the request; the caller closes it."""
        self.descriptors.remove(descriptor)

    def emit(self, event: Any, *, flush: bool = True) -> None:
        """Send an event before the reply; without *flush*, the next flush sends it."""
        self.connection.send([_EVENT, self.number, event], flush=flush)

"""One client's connection in the daemon: its reading, its calls under way, its descriptors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import anyio

from ...backends.errors import Busy
from ...scheduler.owner import Owner
from ...wire.frames import pack_frame
from ..messages import CALLS, CREDIT_MAX, Kind
from ..peer import Peer
from .descriptors import UnclaimedDescriptors, UserDescriptors
from .fairness import LoopTime, SharedLimit
from .request_bytes import Charge, RequestBytes
from .socket_connection import SocketConnection

CALLS_DESCRIPTORS_MAX = 64
"""Descriptors of a connection's calls that have not ended."""


class ServerConnection(SocketConnection):
    """A client's connection to the daemon."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        requests_max: int,
        user: UserDescriptors,
        outboxes: SharedLimit,
        loop_time: LoopTime,
        request_bytes: RequestBytes,
    ):
        self.descriptors = UnclaimedDescriptors(user)
        super().__init__(sock, peer, user, self.descriptors, outboxes, loop_time)
        self.owner = Owner(peer.uid)
        """The owner of its sessions; the client's hello decides it."""
        self.on_behalf_of = ""
        """The name of the user on behalf of whom it acts."""
        self.identified: anyio.Event | None = None
        """Set once the owner of a connection on behalf of another user is known."""
        self.number = 0
        """Its number in the order in which the daemon accepted connections."""
        self.requests: dict[int, Request] = {}
        self.software = ""
        self.wants_copies = False
        """Whether the client gets the changes of its sessions."""
        self.requests_max, self.request_bytes = requests_max, request_bytes

    def __repr__(self) -> str:
        return f"<ServerConnection of uid {self.peer.uid} [{len(self.requests)} requests]>"

    @property
    def has_requests(self) -> bool:
        """Whether requests are in flight."""
        return bool(self.requests)

    def request_ended(self, request: Request) -> None:
        """Remove a request that was answered, or whose connection has ended."""
        self.requests.pop(request.number, None)
        self.note_request_ended()

    def check_capacity(self, request: Request) -> None:
        """Check that the connection may have another request under way.

        :raises Busy: too many requests are under way, or the requests of the connection, of its
            user or of all users have too many descriptors.
        """
        if len(self.requests) >= self.requests_max:
            raise Busy(
                f"{self.requests_max} requests are in flight on this connection",
                data={"requests_max": self.requests_max, "retry_after_s": 0.1},
            )
        if not request.descriptors:
            return
        kept = sum(len(other.descriptors) for other in self.requests.values())
        if kept + len(request.descriptors) > CALLS_DESCRIPTORS_MAX:
            raise Busy(
                f"the calls in flight on this connection have {kept} descriptors",
                hint="wait for their answers",
                data={"calls_descriptors_max": CALLS_DESCRIPTORS_MAX, "retry_after_s": 0.1},
            )
        self.user.check_call()


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
        self.connection.send_frame(pack_frame([_EVENT, self.number, event]), flush=flush)

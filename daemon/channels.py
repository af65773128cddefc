"""The channels of clients to the processes of their graphs.

A computation in a channel does not pass through the daemon: the process reports how much a channel
is used (`scheduler.channels`). From this the daemon counts usage, keeps the model in memory, and
assigns cores. Whenever a check fails that would be made for each call, it closes the channel, and
the client makes its calls here.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from ..backends.errors import Busy, InferdError, InvalidArgument, QuotaExceeded
from ..ipc.server.connection import Request
from ..scheduler import messages as m
from ..scheduler.owner import Owner, Priority
from .graph_table import Graph
from .residency.residency import ResidencyRequest
from .workers.process_client import ProcessClient

if TYPE_CHECKING:
    from .core import Daemon

USER_MAX = 64
"""Channels of one user to one process."""
PROCESS_MAX = 256
"""Channels of all users to one process."""


class GraphChannel:
    """A channel of the client that has *graph*, opened by *request*."""

    def __init__(self, daemon: Daemon, request: Request, graph: Graph, client: ProcessClient):
        self._daemon, self._request, self._graph, self._client = daemon, request, graph, client
        self._admission: ResidencyRequest | None = None
        """Keeps the model in memory while the channel is used."""
        self._number = 0

    def open(self, descriptor: int) -> None:
        """Let the process serve the socket *descriptor*, which stays the caller's.

        :raises QuotaExceeded: the user has too many channels, or its inputs have crashed a process.
        :raises Busy: the process has too many.
        """
        graph, client = self._graph, self._client
        owner, name_ceiling = graph.connection.owner, graph.lease.ceilings.priority_max
        ceiling = self._daemon.ledger.requester(owner, name_ceiling).priority
        check_channels(client, owner)
        try:
            duplicate = os.dup(descriptor)
        except OSError as exc:
            raise Busy(
                f"the daemon has too many open files: {exc.strerror}",
                hint="compute on a context, or raise the daemon's limit (LimitNOFILE=)",
            ) from None
        self._number = client.open_channel(
            m.OpenChannel(0, owner, min(Priority.NORMAL, ceiling), ceiling),
            duplicate,
            self._note_use,
        )

    def close(self, *, at_once: bool = False) -> None:
        """Close it once its computations have ended, or drop these; a second call does nothing."""
        self._client.close_channel(self._number, at_once=at_once)

    def _note_use(self, use: m.ChannelUse) -> None:
        graph, daemon = self._graph, self._daemon
        owner = graph.connection.owner
        if use.computed:
            daemon.usage.count_computation(
                owner, graph.connection.key, graph.lease, use.seconds, use.computed
            )
        if use.under_way and self._admission is None:
            self._admit(use.priority)
        elif not use.under_way and self._admission is not None:
            admission, self._admission = self._admission, None
            daemon.registry.loader.end_request(graph.lease.model, admission)
        if use.closed:
            graph.note_channel_ended(self)
        elif not self._may_continue():
            self.close()

    def _admit(self, priority: Priority) -> None:
        daemon, model = self._daemon, self._graph.lease.model
        admission = ResidencyRequest(
            priority,
            daemon.registry.seconds(),
            user=self._graph.connection.owner.user,
            subject=self,
            is_turn=True,
        )
        if daemon.registry.loader.admit_to_loaded(model, admission):
            self._admission = admission

    def _may_continue(self) -> bool:
        daemon, lease = self._daemon, self._graph.lease
        if daemon.draining or lease.closed or lease.held or lease.loaded is not self._client:
            return False
        if daemon.registry.loader.has_waiting_loads:  # the calls wait for their turn there
            return False
        try:
            daemon.check_usage(self._request)
        except InferdError:
            return False
        return True


def check_channels(client: ProcessClient, owner: Owner) -> None:
    """Check that a user may have another channel to a process.

    :raises QuotaExceeded: it has too many, or its inputs have crashed a process.
    :raises Busy: the process has too many.
    """
    channels = client.channels.values()
    if not client.quarantine.trusts(owner.user):
        raise QuotaExceeded(
            f"your inputs have crashed the worker process of {client.spec.name!r}, or may have",
            hint="compute on a context: the daemon looks for the input that is the cause",
        )
    if sum(channel.owner.user == owner.user for channel in channels) >= USER_MAX:
        raise QuotaExceeded(
            f"you have {USER_MAX} channels to {client.spec.name!r}",
            hint="compute on a context, or close a connection",
            data={"channels_max": USER_MAX},
        )
    if len(channels) >= PROCESS_MAX:
        raise Busy(
            f"{client.spec.name!r} has {PROCESS_MAX} channels",
            hint="compute on a context",
            data={"channels_max": PROCESS_MAX},
        )


def check_socket(descriptor: int) -> None:
    """Check that a *descriptor* is that of a connected Unix stream socket, but of no connection to
    a server.

    :raises InvalidArgument: it is not.
    """
    hint = "pass one end of a socket pair (`socketpair`, AF_UNIX, SOCK_STREAM)"
    if descriptor < 0:
        raise InvalidArgument("the call has no descriptor", hint=hint)
    try:
        # No close, not even of a duplicate: that of a file takes as long as its sender wants.
        found = socket.socket(fileno=descriptor)
        try:
            is_stream = found.family == socket.AF_UNIX and found.type == socket.SOCK_STREAM
            peer = found.getpeername()
        finally:
            found.detach()
    except OSError as exc:
        raise InvalidArgument(
            f"the descriptor is not a connected socket: {exc.strerror}", hint=hint
        ) from None
    if not is_stream:
        raise InvalidArgument("the descriptor is not a Unix stream socket", hint=hint)
    if peer:  # of a connection to the daemon, the process would keep the client's end open
        raise InvalidArgument("the descriptor is a connection to a server's socket", hint=hint)

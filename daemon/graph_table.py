"""The clients' graphs: leases on models, with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ..backends.errors import InvalidArgument
from ..backends.params import Options
from ..ipc.server.connection import ServerConnection
from ..sessions.admission.bounds import KeptBytes
from ..sessions.memory import memory_bytes
from .models.registry import Lease

GRAPHS_MAX = 1000
"""Graphs per connection."""


class Channel(Protocol):
    """A channel to the process of a graph; see `GraphChannel`."""

    def close(self, *, at_once: bool = False) -> None:
        """Close it; see `GraphChannel.close`."""


class Graph:
    """A client's graph."""

    def __init__(self, handle: int, connection: ServerConnection, lease: Lease, requested: Options):
        self.handle, self.connection, self.lease = handle, connection, lease
        self.is_loaded = False
        """Whether the model was loaded for it, and calls may use it."""
        self.options = requested.values
        self.origins: dict[str, str] = {}
        """The sources of options by name: the model file, `init_backend`, or the model's
        configuration. An option without a source is the graph's own.
        """
        self.not_applied: dict[str, Any] = {}
        self.ignored = requested.ignored
        self.adjusted = requested.adjusted
        self._channel: Channel | None = None

    def set_channel(self, channel: Channel | None) -> None:
        """Use another channel to the model's process, or none, and close the present one."""
        if self._channel is not None:
            self._channel.close(at_once=True)
        self._channel = channel

    def note_channel_ended(self, channel: Channel) -> None:
        """Note that a channel has ended."""
        if self._channel is channel:
            self._channel = None

    @property
    def kept_bytes(self) -> int:
        """The memory that the graph's parameters take."""
        notes = self.not_applied, self.ignored, self.adjusted
        return memory_bytes(self.options, self.origins, *notes)


class GraphTable:
    """The graphs by connection and handle. Owned by the daemon's event loop.

    A graph counts before its model is loaded; otherwise calls that load at the same time could
    exceed the bounds together.
    """

    def __init__(self, new_handle: Callable[[], int], kept_bytes: KeptBytes):
        self._new_handle, self._kept_bytes = new_handle, kept_bytes
        self._graphs: dict[ServerConnection, dict[int, Graph]] = {}
        self._backends: WeakKeyDictionary[ServerConnection, dict[str, Any]] = WeakKeyDictionary()
        """The defaults of graphs, on connections that called `init_backend`."""

    @contextmanager
    def opening(
        self, connection: ServerConnection, lease: Lease, requested: Options
    ) -> Iterator[Graph]:
        """Yield a new graph, which calls may use once the body ends; an error in it closes *lease*.

        :raises InvalidArgument: the connection has too many graphs.
        :raises QuotaExceeded: its user's sessions and graphs would become too large.
        """
        graph = Graph(self._new_handle(), connection, lease, requested)
        try:
            graphs = self._graphs.setdefault(connection, {})
            if len(graphs) >= GRAPHS_MAX:
                raise InvalidArgument(
                    f"{GRAPHS_MAX} graphs are loaded on this connection", hint="unload some"
                )
            self._kept_bytes.check_growth(connection.owner, graph.kept_bytes)
            # There is no `await` between the checks and this line.
            graphs[graph.handle] = graph
            self._kept_bytes.add_holder(graph, connection.owner, graph.kept_bytes)
            yield graph
        except BaseException:
            self.remove_graph(graph)
            lease.close()
            raise
        graph.is_loaded = True
        self._kept_bytes.set_bytes(graph, graph.kept_bytes)

    def set_backend(self, connection: ServerConnection, defaults: dict[str, Any]) -> None:
        """Set the defaults of later graphs of a connection."""
        self._backends[connection] = defaults

    def backend_of(self, connection: ServerConnection) -> dict[str, Any]:
        """Return the defaults of a connection's graphs."""
        return self._backends.get(connection, {})

    def find_graph(self, connection: ServerConnection, handle: int) -> Graph | None:
        """Return a loaded graph of a connection."""
        graph = self._graphs.get(connection, {}).get(handle)
        return graph if graph is not None and graph.is_loaded else None

    def get_graph(self, connection: ServerConnection, handle: int) -> Graph:
        """Return a loaded graph of a connection.

        :raises InvalidArgument: the connection has no such graph.
        """
        graph = self.find_graph(connection, handle)
        if graph is None:
            raise InvalidArgument(
                f"there is no graph {handle} on this connection",
                hint="load it: handles are valid until unload or the end of their connection",
            )
        return graph

    def remove_graph(self, graph: Graph) -> None:
        """Remove a graph, whose lease the caller closes, and close its channel."""
        graph.set_channel(None)
        graphs = self._graphs.get(graph.connection, {})
        graphs.pop(graph.handle, None)
        if not graphs:
            self._graphs.pop(graph.connection, None)
        self._kept_bytes.remove_holder(graph)

    def close_graphs(self, connection: ServerConnection) -> None:
        """Close the loaded graphs of a connection, and their leases."""
        self._backends.pop(connection, None)
        for graph in tuple(self._graphs.get(connection, {}).values()):
            if graph.is_loaded:
                self.remove_graph(graph)
                graph.lease.close()

"""The call that opens a channel of a client to the process of a graph."""

from __future__ import annotations

from ...backends.errors import Busy, UnsupportedOperation
from ...ipc import messages as w
from ...ipc.server.connection import Request
from ..channels import GraphChannel, check_socket
from ..core import Daemon


def open_channel(daemon: Daemon, request: Request) -> w.Empty:
    """Open a channel to the process of a graph; one that the graph had before is closed."""
    daemon.check_open()
    daemon.check_usage(request)
    graph, p = daemon.graph(request), request.params
    if not graph.lease.is_graph:
        raise UnsupportedOperation(
            f"{graph.lease.name!r} has no channels, because it is not a graph",
            hint="only graphs have channels",
        )
    check_socket(p.fd)
    client = graph.lease.loaded
    if client is None or graph.lease.held or daemon.registry.loader.has_waiting_loads:
        raise Busy(
            f"{graph.lease.name!r} is not in memory, or may not stay there",
            hint="compute on a context, which waits for the model",
        )
    channel = GraphChannel(daemon, request, graph, client)
    channel.open(p.fd)
    graph.set_channel(channel)
    return w.Empty()

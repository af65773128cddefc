"""The daemon's graphs and contexts of a guest, which are opened again when the daemon lost them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from ...backends.errors import ConnectionLost, InferdError, SessionExpired, ShuttingDown
from .daemon_link import DaemonLink
from .graphs import METADATA_INDEX, GuestContext, GuestGraph

if TYPE_CHECKING:
    from ...ipc.client import Client

R = TypeVar("R")
_LOST = (ConnectionLost, ShuttingDown, SessionExpired)


class Remote:
    """Calls to the daemon for one guest's graphs and contexts.

    A restart of the daemon voids all handles, and an idle context expires. The next call opens the
    context again, with its parameters and its prompt.
    """

    def __init__(self, link: DaemonLink):
        self.link = link

    def load_graph(self, graph: GuestGraph) -> None:
        """Load the model of a graph."""
        self.link.call(lambda client: self._graph(client, graph))

    def open_context(self, context: GuestContext) -> None:
        """Open a context."""
        self.link.call(lambda client: self._context(client, context))

    def call(self, context: GuestContext, action: Callable[[Client, int, float], R]) -> R:
        """Return the result of *action*, which gets a client, the context's handle and a timeout.
        It is repeated when the daemon has lost the context.
        """

        def act(client: Client) -> R:
            handle = self._context(client, context)
            return action(client, handle, self.link.timeout_s)

        try:
            return self.link.call(act)
        except SessionExpired:
            context.generation = -1
            return self.link.call(act)

    def read_output(self, context: GuestContext, index: int) -> bytes:
        """Return an output of the last turn."""
        return self.call(context, lambda c, handle, s: c.get_output(handle, index, timeout=s))

    def set_input(self, context: GuestContext, index: int, data: bytes) -> None:
        """Set an input."""
        self.call(context, lambda c, handle, s: c.set_input(handle, index, data, timeout=s))

    def clear_output(self, context: GuestContext) -> None:
        """End the turn of a context and discard its output."""
        self.call(context, lambda c, handle, s: c.fini_single(handle, timeout=s))

    def close_context(self, context: GuestContext) -> None:
        """Close a context, if the daemon still has it."""
        if context.generation == self.link.generation:
            with suppress(*_LOST):
                self.link.client.finalize_execution_context(
                    context.handle, timeout=self.link.timeout_s
                )
            context.generation = -1

    def unload_graph(self, graph: GuestGraph) -> None:
        """End a lease, if the daemon still has it."""
        if graph.generation == self.link.generation:
            with suppress(*_LOST):
                self.link.client.unload(graph.handle, timeout=self.link.timeout_s)
            graph.generation = -1

    def _graph(self, client: Client, graph: GuestGraph) -> int:
        if graph.generation != self.link.generation:
            graph.handle = graph.load(client, self.link.timeout_s)
            graph.generation = self.link.generation
        return graph.handle

    def _context(self, client: Client, context: GuestContext) -> int:
        """Return the daemon's handle of a context. An unfinished turn continues after its text."""
        if context.generation == self.link.generation:
            return context.handle
        graph = self._graph(client, context.graph)
        handle = client.init_execution_context(graph, timeout=self.link.timeout_s)
        try:
            self._restore_inputs(client, handle, context)
        except InferdError:
            with suppress(InferdError):
                client.finalize_execution_context(handle, timeout=self.link.timeout_s)
            raise
        context.handle, context.generation = handle, self.link.generation
        return handle

    def _restore_inputs(self, client: Client, handle: int, context: GuestContext) -> None:
        for data in context.settings:
            client.set_input(handle, METADATA_INDEX, data, timeout=self.link.timeout_s)
        context.prefix = (context.text or b"") if context.in_turn else b""
        if context.prompt is not None:
            prompt = context.prompt + context.prefix
            client.set_input(handle, 0, prompt, timeout=self.link.timeout_s)

"""The contexts of one client of the entry, and the handles by which clients name them.

A handle of a daemon has the daemon's start count in its upper half and a counter in its lower one.
An entry keeps the counter and replaces the count by a number of its own for the node and the count.
So a handle names its node, is never reused, and needs no table.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from ....backends.errors import InvalidArgument, SessionExpired
from ....backends.recent_dict import RecentDict
from ..certificates import write_private
from ..frames import Fields, integer_in, raw_of
from ..nodes.nodes import Nodes
from ..nodes.upstream import Upstream
from ..routing.loads import TurnKind

_LOW = (1 << 32) - 1


class Incarnation(NamedTuple):
    """A start of a node's daemon."""

    node: str
    instance: int


class _Numbers(msgspec.Struct):
    starts: int = 0
    incarnations: list[tuple[str, int]] = []


class Incarnations:
    """The numbers, from 1, in a file of the state directory. Owned by the entry's event loop."""

    def __init__(self, folder: Path):
        self._file = folder / "incarnations.json"
        self._state = _Numbers()
        self._numbers: dict[Incarnation, int] = {}

    @property
    def starts(self) -> int:
        return self._state.starts

    def open(self) -> None:
        """Read the file, and count this start in it.

        :raises InvalidArgument: the state directory cannot be used.
        """
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._file.exists():
                self._state = msgspec.json.decode(self._file.read_bytes(), type=_Numbers)
            self._state.starts += 1
            self._write()
        except (OSError, msgspec.DecodeError) as exc:
            raise InvalidArgument(
                f"the state of the fleet in {self._file} cannot be used: {exc}",
                hint="set state-dir to a folder that the entry can write; if the file is damaged,"
                " move it away while no client is connected",
            ) from None
        for number, pair in enumerate(self._state.incarnations, 1):
            self._numbers[Incarnation(*pair)] = number

    def _write(self) -> None:
        write_private(self._file, msgspec.json.encode(self._state))

    def number_of(self, node: str, instance: int) -> int:
        """Return the number of a start of a node's daemon; a new one is written first.

        :raises OSError: it cannot be written.
        """
        incarnation = Incarnation(node, instance)
        number = self._numbers.get(incarnation)
        if number is None:
            self._state.incarnations.append((node, instance))
            try:
                self._write()
            except OSError:
                self._state.incarnations.pop()
                raise
            number = self._numbers[incarnation] = len(self._state.incarnations)
        return number

    def find(self, handle: int) -> Incarnation | None:
        """Return the start of a daemon to which a client's handle belongs, if there was one."""
        number = handle >> 32
        if 0 < number <= len(self._state.incarnations):
            return Incarnation(*self._state.incarnations[number - 1])
        return None


def client_handle(number: int, handle: int) -> int:
    """Return the client's handle for a daemon's *handle*, by the number of the daemon's start."""
    return number << 32 | handle & _LOW


def daemon_handle(incarnation: Incarnation, handle: int) -> int:
    """Return the daemon's handle for a client's *handle*."""
    return incarnation.instance << 32 | handle & _LOW


EXPIRED_MAX = 10_000
"""Contexts of lost nodes that a client's connection remembers."""
SETUP_CALLS_MAX, SETUP_BYTES_MAX = 8, 64 << 10
"""Calls before the first prompt that can be repeated on another node."""


class NewContext:
    """A context before its first prompt: the call that has opened it, and those that have prepared
    it. `head` is the text that comes before the prompt, such as a system prompt.
    """

    def __init__(self, call: str, params: Fields):
        self.call = call
        self.params = {name: params[name] for name in params if name != "queue_timeout_s"}
        self.setup: list[tuple[str, Fields]] = []
        self.head = b""
        self._bytes = _bytes_of(params)

    @property
    def is_too_large(self) -> bool:
        """Whether its calls are too many or too large to be repeated on another node."""
        return len(self.setup) > SETUP_CALLS_MAX or self._bytes > SETUP_BYTES_MAX

    def add_setup(self, call: str, params: Fields, head: bytes) -> bool:
        """Note a call that prepares the context; return False if there are too many."""
        self._bytes += _bytes_of(params)
        if len(self.setup) == SETUP_CALLS_MAX or self.is_too_large:
            return False
        self.setup.append((call, params))
        self.head += head
        return True


def _bytes_of(params: Fields) -> int:
    return sum(len(raw) for raw in params.values())


class OpenContext(NamedTuple):
    """An open context: its node, the id of its session or an empty text, its turns' kind, its
    graph, and what is known of it before its first prompt.
    """

    node: str
    session_id: str
    kind: TurnKind
    graph: FleetGraph
    new: NewContext | None = None


class SuspendedContext:
    """A context that moves to another node. Requests on it wait until it is `settled`; if its
    session is closed then, the next request opens the session again.
    """

    def __init__(self, handle: int, context: OpenContext):
        self.handle, self.context = handle, context
        self.settled = anyio.Event()
        self.lock = anyio.Lock()


class FleetGraph:
    """A client's graph: the call that loads its model, and the graph's handle on each node that
    has loaded the model for this client. The model of a descriptor is on one *node* only.
    """

    def __init__(self, call: str, params: Fields, model: str, node: str = ""):
        self.call, self.model, self.node = call, model, node
        self.params = {name: value for name, value in params.items() if name != "progress"}
        self.leases: dict[str, int] = {}
        self.lock = anyio.Lock()
        """Held while a lease begins or ends."""
        self.used = Counter[str]()
        """The uses under way by node, beside open contexts."""
        self.uses = Counter[str]()
        """All uses so far by node."""
        self.ending: set[str] = set()
        """The nodes on which the lease ends unless it is used again."""


class ClientContexts:
    """Owned by the client's state. The client's handle of a context stays when the context moves;
    its handle on the new node differs.
    """

    def __init__(self, nodes: Nodes, incarnations: Incarnations):
        self._nodes, self._incarnations = nodes, incarnations
        self._open: dict[int, OpenContext] = {}
        self._expired = RecentDict[int, str](EXPIRED_MAX)
        """By the handle of a context that was lost with its node, the node."""
        self.suspended: dict[int, SuspendedContext] = {}
        """Contexts that move, or whose sessions were closed by a move."""
        self._moved: dict[int, int] = {}
        """By the client's handle of a moved context, its new node's handle in the client's form."""
        self._aliases: dict[int, int] = {}
        """The reverse of `_moved`."""

    def note_open(self, handle: int, context: OpenContext) -> None:
        self._open[handle] = context

    def client_handle(self, upstream: Upstream, handle: int) -> int:
        number = self._incarnations.number_of(upstream.node, upstream.instance)
        found = client_handle(number, handle)
        return self._aliases.get(found, found)

    def map_listed(self, node: str, handle: int) -> int:
        """Return the client's handle for a context of *node* in a list."""
        number = self._incarnations.number_of(node, handle >> 32)
        found = client_handle(number, handle)
        return self._aliases.get(found, found)

    @property
    def count_by_node(self) -> Counter[str]:
        """The numbers of open contexts by node."""
        return Counter(context.node for context in self._open.values())

    def find(self, params: Fields) -> OpenContext | None:
        """Return the open context in *params*; None if it is not one of this connection's."""
        return self._open.get(integer_in(params, "context"))

    def find_session(self, node: str, session_id: str) -> tuple[int, OpenContext] | None:
        """Return an open context on *node* with its handle, by the id of its session."""
        for handle, context in self._open.items():
            if context.session_id == session_id and context.node == node:
                return handle, context
        return None

    def note_used(self, params: Fields) -> None:
        """Note a call on the context in *params*, which then no longer counts as new."""
        handle = integer_in(params, "context")
        context = self._open.get(handle)
        if context is not None and context.new is not None:
            self._open[handle] = context._replace(new=None)

    def resume(self, suspended: SuspendedContext) -> None:
        """Let the requests on a context go on. It stays suspended if its session is closed."""
        if not self.is_closed(suspended) and self.suspended.get(suspended.handle) is suspended:
            del self.suspended[suspended.handle]
        suspended.settled.set()

    def is_closed(self, suspended: SuspendedContext) -> bool:
        """Return whether the session of a suspended context is closed, to be opened again."""
        if not suspended.context.session_id or suspended.handle not in self.suspended:
            return False
        return suspended.handle not in self._open and suspended.handle not in self._expired

    def daemon_handle(self, handle: int) -> int:
        """Return the daemon's handle for that of an open context."""
        incarnation, own = self.incarnation_of({"context": raw_of(handle)})
        return daemon_handle(incarnation, own)

    def note_reopened(self, handle: int, opened: int, node: str) -> bool:
        """Note that the session of a suspended context was opened again as *opened*; return False
        if the client has ended the context meanwhile.
        """
        suspended = self.suspended.pop(handle, None)
        if suspended is not None:
            self.move(handle, suspended.context, opened, node)
        return suspended is not None

    def has_ended(self, handle: int) -> bool:
        """Return whether the client has closed a context that it had."""
        return handle not in self._open and handle not in self._expired

    def move(self, handle: int, context: OpenContext, opened: int, node: str) -> None:
        """Note that a context is open as *opened* on *node* now."""
        self._aliases.pop(self._moved.pop(handle, 0), None)
        self._open[handle] = context._replace(node=node, new=None)
        self._expired.pop(handle, None)
        if opened != handle:
            self._moved[handle], self._aliases[opened] = opened, handle

    def expire(self, handle: int) -> None:
        """Note that the session of a suspended context no longer exists."""
        suspended = self.suspended.pop(handle, None)
        if suspended is not None:
            self._expired[handle] = suspended.context.node

    def drop(self, handle: int) -> OpenContext | None:
        """Note that a context was closed, and return it."""
        self._aliases.pop(self._moved.pop(handle, 0), None)
        return self._open.pop(handle, None)

    def drop_session(self, session_id: str) -> list[OpenContext]:
        """Note that a session with an id was deleted, and return its contexts."""
        found = [h for h, context in self._open.items() if context.session_id == session_id]
        return [context for handle in found if (context := self.drop(handle)) is not None]

    def incarnation_of(self, params: Fields) -> tuple[Incarnation, int]:
        """Return the daemon that has the context in *params*, and the context's handle there in the
        client's form.

        :raises InvalidArgument: there is no such context.
        :raises SessionExpired: its node was lost.
        """
        handle = integer_in(params, "context")
        if handle in self._expired:
            raise SessionExpired(
                f"the node {self._expired[handle]} was lost, and this context with it",
                data={"cause": "node", "node": self._expired[handle]},
            )
        handle = self._moved.get(handle, handle)
        found = self._incarnations.find(handle)
        if found is None or found.node not in self._nodes.links:
            raise InvalidArgument(f"there is no context {handle} on this connection")
        return found, handle

    def suspend(self, handle: int, context: OpenContext) -> SuspendedContext:
        suspended = self.suspended[handle] = SuspendedContext(handle, context)
        return suspended

    def are_on(self, graph: FleetGraph, node: str) -> bool:
        """Return whether a context of *graph* is open on *node*."""
        return any(c.graph is graph and c.node == node for c in self._open.values())

    def drop_all(self) -> None:
        """Forget all contexts, which the nodes have closed."""
        for table in (self._open, self.suspended, self._moved, self._aliases):
            table.clear()

    def lose_node(self, node: str) -> int:
        """Note that the open contexts on a node were lost; return how many there were."""
        lost = [handle for handle, context in self._open.items() if context.node == node]
        for handle in lost:
            self.drop(handle)
            self._expired[handle] = node
        return len(lost)

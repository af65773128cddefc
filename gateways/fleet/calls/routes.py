"""The table of routes: which node gets a call, and which of its fields are handles.

Most of it follows from the types of the messages. A call that is not in the protocol's table, of a
newer client, is routed by its fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum, auto
from typing import NamedTuple

from ....ipc.messages import CALLS, Call

HANDLES = frozenset(("graph", "context", "contexts"))
"""The fields with handles, in params, results and events alike."""
SESSION = "session"
"""A field of a result that describes a session, with its context."""


PULLED = "compute_single"
"""A call for one token, of a turn that takes many such calls."""


class Route(Enum):
    """The choice of the node, or nodes, for a call."""

    LOAD = auto()
    """A node for a new graph, by the model's name."""
    OPEN = auto()
    """A node for a new context, by its graph's model and its session."""
    GRAPH = auto()
    """A node that has the graph's model."""
    LEASES = auto()
    """All nodes on which the graph holds its model."""
    CONTEXT = auto()
    """The node of the context."""
    CANCEL = auto()
    """The node of the request or context."""
    SESSION = auto()
    """The node of the context, or all nodes for a session's id."""
    MODEL = auto()
    """All nodes that have the model, one after the other."""
    ALL = auto()
    """All nodes that can be reached, at once."""
    COPY = auto()
    """Two nodes: the file of a model passes through the entry."""
    ENTRY = auto()
    """The entry itself."""
    NONE = auto()
    """No node, because the call is between daemons."""
    CONNECTED = auto()
    """The nodes to which the client is connected, and later ones."""


class CallRoute(NamedTuple):
    """The route of a call, and its fields with handles."""

    route: Route
    in_result: frozenset[str] = frozenset()
    in_events: frozenset[str] = frozenset()
    has_tensors: bool = False
    """Whether its params may refer to descriptors."""
    has_turn: bool = False
    """Whether it is a whole turn of a context."""


_BY_NAME = {
    "unload": Route.LEASES,
    "cancel": Route.CANCEL,
    **dict.fromkeys(("delete_session", "history"), Route.SESSION),
    **dict.fromkeys(("update_session", "restore_session"), Route.SESSION),
    "init_backend": Route.CONNECTED,
    "deinit_backend": Route.CONNECTED,
    **dict.fromkeys(
        ("unload_model", "pin", "unpin", "swap", "add_adapter", "remove_adapter"), Route.MODEL
    ),
    **dict.fromkeys(
        ("models", "show", "sessions", "queue", "stats", "list_states", "delete_state"), Route.ALL
    ),
    "list_deletions": Route.ALL,
    **dict.fromkeys(("log_level", "drain"), Route.ALL),
    "metrics": Route.ENTRY,
    **dict.fromkeys(("export_session", "import_session", "end_transfer"), Route.NONE),
    **dict.fromkeys(("read_copy", "store_copy", "exchange_served"), Route.NONE),
    **dict.fromkeys(
        ("add_model", "export_model", "import_model", "end_model_transfer"), Route.NONE
    ),
    "copy_model": Route.COPY,
}
"""The calls whose route does not follow from their types."""


def _fields(*kinds: type) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in kind.__struct_fields__)  # type: ignore[attr-defined]


def _derived(params: Collection[str], result: Collection[str]) -> Route | None:
    if "graph" in result:
        return Route.LOAD
    if "context" in params:
        return Route.CONTEXT
    if "graph" in params:
        return Route.OPEN if "context" in result else Route.GRAPH
    return None


def _route_of(name: str, call: Call) -> CallRoute:
    params, result = _fields(call.params), _fields(call.result)
    route = _BY_NAME.get(name) or _derived(params, result)
    assert route is not None, f"the call {name} has no route"
    return CallRoute(
        route,
        result & (HANDLES | {SESSION}),
        _fields(*call.events) & HANDLES,
        bool(params & {"fd", "tensor", "inputs"}),
        params >= {"context", "timeout_s"} and name != PULLED,
    )


ROUTES: Mapping[str, CallRoute] = {name: _route_of(name, call) for name, call in CALLS.items()}


def route_of(call: str, params: Collection[str]) -> CallRoute | None:
    """Return the route of a call; None for one that the entry can send nowhere.

    Handles in the results of an unknown call are expected under the names of known ones.
    """
    known = ROUTES.get(call)
    if known is not None:
        return known
    route = _derived(params, ())
    return None if route is None else CallRoute(route, HANDLES, HANDLES)

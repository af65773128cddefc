"""The choice of the node for a new context.

In this order: the home of its session; a node on which its turn starts at once, preferably one that
has computed the beginning of its prompt; the node with the lowest predicted wait, less the time
that such a beginning saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ....backends.errors import Busy, InferdError
from ....ipc.model_names import model_not_found
from .loads import CLASSES, NONE, ByClass, ModelLoad, NodeLoad
from .memory import evicts_others, fits
from .waits import (
    free_slots,
    must_begin_load,
    predicted_wait_s,
    saved_s,
    starts_at_once,
)

RETRY_S = 1.0
"""Time after which a request that no node can serve should be repeated."""
RETRY_HINT = "try again later: sessions with an id are there again once their node is back"
WAIT_S_MAX = 60.0
"""The longest time to a retry that an error proposes."""


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """The state of the fleet at one moment.

    `loads` has the nodes that can be reached. `unreachable` are the other nodes. `opened` counts,
    by node and model, the turns that a node has beside those of its report, by class.
    """

    loads: Mapping[str, NodeLoad]
    unreachable: Collection[str] = ()
    opened: Mapping[tuple[str, str], ByClass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A context to open. `home` is the node that has its session or state, `recent` the one that
    last served the same owner and model. `covered_bytes` are, by node, the bytes of its prompt's
    beginning that the node has computed lately, where the prompt is known.
    """

    model: str
    priority: int = CLASSES.index("normal")
    home: str | None = None
    recent: str | None = None
    excluded: Collection[str] = ()
    """Nodes that have refused it."""
    covered_bytes: Mapping[str, int] = field(default_factory=dict)


def choose_node(request: RouteRequest, fleet: FleetLoad) -> str:
    """Return the name of the node for a context.

    :raises ModelNotFound: no node has the model.
    :raises Busy: the home of its session cannot be reached, or the nodes that have the model take
        no further context now.
    """
    if request.home is not None:
        if request.home not in fleet.loads:
            raise node_unreachable(request.home)
        return request.home
    candidates = _candidates(request, fleet)
    return min(candidates, key=lambda name: _rank(name, request, fleet))


def _candidates(request: RouteRequest, fleet: FleetLoad) -> list[str]:
    with_model = [name for name, node in fleet.loads.items() if request.model in node.models]
    if not with_model:
        raise _no_node(request, fleet)
    open_nodes = [
        name
        for name in with_model
        if not fleet.loads[name].draining and name not in request.excluded
    ]
    if not open_nodes:
        raise Busy(
            f"the {len(with_model)} nodes with the model {request.model!r} take no further"
            " sessions now",
            data={"nodes": sorted(with_model), "retry_after_s": _retry_after_s(request, fleet)},
        )
    # Where there is nothing else, a failed load is tried again, and a full node may take the place
    # of an idle context for the new one, or let it wait.
    sound = [n for n in open_nodes if not fleet.loads[n].models[request.model].failed]
    found = sound or open_nodes
    found = [n for n in found if fleet.loads[n].sessions < fleet.loads[n].sessions_max] or found
    # Where no node has enough memory, a daemon may load the model with fewer slots.
    return [n for n in found if fits(fleet.loads[n], fleet.loads[n].models[request.model])] or found


def _rank(name: str, request: RouteRequest, fleet: FleetLoad) -> tuple[float, ...]:
    """Return the key of a node: the lowest one is chosen."""
    load, opened = _model_load(name, request.model, fleet)
    node = fleet.loads[name]
    places = (node.sessions + max(0, sum(opened))) / max(1, node.sessions_max)
    free = free_slots(load, opened)
    idle = free - other_turns(name, request.model, fleet)
    mostly_idle = 2 * idle > load.slots
    covered = request.covered_bytes.get(name, 0)
    at_once = starts_at_once(load, opened, request.priority)
    if at_once:
        delay_s, begins_load, evicts = 0.0, False, False
    else:
        wait_s = predicted_wait_s(load, opened, request.priority)
        delay_s = max(0.0, wait_s - saved_s(load, covered))
        begins_load, evicts = must_begin_load(load, opened), evicts_others(node, load)
    return (
        not at_once,
        delay_s,
        at_once and not free,  # it parks another turn
        begins_load,
        evicts,
        -covered if mostly_idle else 0,
        not (name == request.recent and mostly_idle),
        -idle / max(1, load.slots),
        places,
    )


def is_mostly_idle(name: str, model: str, fleet: FleetLoad) -> bool:
    """Return whether most slots of a model on a node are free, where the turns of other models
    count as taken slots.
    """
    load, opened = _model_load(name, model, fleet)
    return 2 * (free_slots(load, opened) - other_turns(name, model, fleet)) > load.slots


def other_turns(name: str, model: str, fleet: FleetLoad) -> int:
    """Return the turns of other models on a node: they share its processors with a new turn."""
    return sum(
        max(0, sum(load.running) + sum(fleet.opened.get((name, other), NONE)))
        for other, load in fleet.loads[name].models.items()
        if other != model
    )


def _model_load(name: str, model: str, fleet: FleetLoad) -> tuple[ModelLoad, ByClass]:
    return fleet.loads[name].models[model], fleet.opened.get((name, model), NONE)


def _retry_after_s(request: RouteRequest, fleet: FleetLoad) -> float:
    """Return the shortest predicted wait, which is when a place may become free."""
    waits = [
        predicted_wait_s(*_model_load(name, request.model, fleet), request.priority)
        for name, node in fleet.loads.items()
        if request.model in node.models
    ]
    return min(max(RETRY_S, min(waits, default=RETRY_S)), WAIT_S_MAX)


def _no_node(request: RouteRequest, fleet: FleetLoad) -> InferdError:
    if fleet.unreachable:
        return Busy(
            f"no reachable node has the model {request.model!r}",
            hint=RETRY_HINT,
            data={
                "cause": "node",
                "nodes": sorted(fleet.unreachable),
                "retry_after_s": RETRY_S,
            },
        )
    return model_not_found(
        request.model,
        model_names(fleet.loads),
        f"no node has a model named {request.model[:200]!r}",
        "`inferd models` lists the names",
    )


def model_names(loads: Mapping[str, NodeLoad]) -> set[str]:
    """Return the names of the models on all nodes."""
    return {model for node in loads.values() for model in node.models}


def node_unreachable(name: str) -> Busy:
    """Return the error for a request that only the node *name* can serve."""
    return Busy(
        f"the node {name} cannot be reached",
        hint=RETRY_HINT,
        data={"cause": "node", "node": name, "retry_after_s": RETRY_S},
    )

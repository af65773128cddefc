"""The choice of the node for a new context, and of one that loads a model before it is needed.

In this order: the home of its session; a node on which its turn starts at once, preferably one that
has computed the beginning of its prompt; the node with the lowest predicted wait, less the time
that such a beginning saves. Nodes without enough memory for the model are left out where others
have it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ....backends.errors import Busy, InferdError
from ....ipc.model_names import model_not_found
from .loads import CLASSES, NONE, ByClass, ModelLoad, NodeLoad


def fits(node: NodeLoad, load: ModelLoad) -> bool:
    """Return whether a node has memory for a model, if idle models are unloaded for it. A loaded
    model fits, and so does one of which nothing is known.
    """
    return _missing_bytes(node, load) <= node.evictable_bytes


def evicts_others(node: NodeLoad, load: ModelLoad) -> bool:
    """Return whether other models have to be unloaded for a load of a model."""
    return _missing_bytes(node, load) > 0


def _missing_bytes(node: NodeLoad, load: ModelLoad) -> int:
    """Return the bytes that a load needs beyond the free ones; if it needs none, 0 or less."""
    if load.loaded or load.need_bytes is None or node.free_bytes is None:
        return 0
    return load.need_bytes - node.free_bytes


BYTES_OF_TOKEN = 4
"""Bytes of a token of a usual text."""
TURN_TOKENS = 128
"""Tokens that a turn is expected to compute, before anything is known of it."""


def free_slots(load: ModelLoad, opened: ByClass) -> int:
    """Return the slots of a loaded model that no turn occupies or waits for.

    *opened* are turns that the node has beside those of its report; negative numbers are turns that
    have ended since.
    """
    if not load.loaded:
        return 0
    turns = sum(load.running) + sum(load.waiting) + sum(opened)
    return max(0, load.slots - max(0, turns))


def must_begin_load(load: ModelLoad, opened: ByClass) -> bool:
    """Return whether a turn would be the first that makes the node load the model."""
    return not (load.loaded or load.loading or sum(load.waiting) + sum(opened) > 0)


def starts_at_once(load: ModelLoad, opened: ByClass, priority: int) -> bool:
    """Return whether a turn of the class *priority* gets a slot at once: a free one, or that of a
    turn of a lower class, which is parked.
    """
    if not load.loaded or not load.slots:
        return False
    ahead = sum(n for turns in (load.running, load.waiting, opened) for n in turns[priority:])
    return ahead < load.slots


def saved_s(load: ModelLoad, covered_bytes: int) -> float:
    """Return the time that a turn saves if *covered_bytes* of its prompt need not be computed."""
    token_s = load.token_s if load.prompt_token_s is None else load.prompt_token_s
    return covered_bytes / BYTES_OF_TOKEN * token_s


def predicted_wait_s(load: ModelLoad, opened: ByClass, priority: int) -> float:
    """Return the time until a turn of the class *priority* is expected to get a slot.

    It waits for the work of its class and higher ones that is queued before it, and for one slot's
    part of the running work. A model that is not loaded is loaded first, and then computes the
    turns that wait for it.
    """
    if not load.loaded:
        ahead = sum(load.waiting[priority:]) + max(0, sum(opened[priority:]))
        if ahead < load.slots:
            return load.load_s
        waiting = sum(load.waiting_tokens[priority:])
        return load.load_s + (waiting + max(0, sum(opened[priority:])) * TURN_TOKENS) * load.token_s
    if starts_at_once(load, opened, priority):
        return 0.0
    queued = sum(load.waiting_tokens[priority:]) + sum(opened[priority:]) * TURN_TOKENS
    running = sum(load.running_tokens[priority:]) / max(1, load.slots)
    return max(load.token_s, (queued + running) * load.token_s)


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


def node_to_warm_up(model: str, chosen: str, fleet: FleetLoad) -> str | None:
    """Return an idle node with free memory that is to load a model now, because most slots of
    *chosen*, the best node for a request, are taken. Return None if most of them are free, if
    there is no such node, or if one is already loading the model.
    """
    if is_mostly_idle(chosen, model, fleet):
        return None
    found: list[tuple[float, str]] = []
    for name, node in fleet.loads.items():
        load = node.models.get(model)
        if load is None or load.loaded or node.draining or load.failed:
            continue
        if not must_begin_load(load, fleet.opened.get((name, model), NONE)):
            return None
        is_idle = not other_turns(name, model, fleet)
        if is_idle and fits(node, load) and not evicts_others(node, load):
            found.append((load.load_s, name))
    return min(found)[1] if found else None

"""The choice of a node that loads a model before a request needs it there."""

from __future__ import annotations

from .choice import FleetLoad, is_mostly_idle, other_turns
from .loads import NONE
from .memory import evicts_others, fits
from .waits import must_begin_load


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

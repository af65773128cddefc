"""The choice of the node that keeps the copy of a session."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..routing.loads import NodeLoad
from ..routing.memory import fits


def choose_follower(
    model: str,
    home: str,
    loads: Mapping[str, NodeLoad],
    copies: Mapping[str, int],
    excluded: Collection[str] = (),
) -> str | None:
    """Return the node for a copy of a session of *model* on *home*; None: no node can take it.

    Nodes with memory for the model are preferred, then those that have loaded it, then those with
    the fewest *copies*.
    """
    candidates = [name for name in loads if may_follow(name, model, home, loads, excluded)]
    return min(candidates, key=lambda name: _rank(name, model, loads, copies), default=None)


def may_follow(
    node: str,
    model: str,
    home: str,
    loads: Mapping[str, NodeLoad],
    excluded: Collection[str] = (),
) -> bool:
    """Return whether a node may have the copy of a session of *model* on *home*."""
    load = loads.get(node)
    if load is None or load.draining or node == home or node in excluded:
        return False
    return not model or model in load.models


def _rank(
    name: str, model: str, loads: Mapping[str, NodeLoad], copies: Mapping[str, int]
) -> tuple[bool, bool, int, str]:
    load = loads[name].models.get(model)
    return (
        load is not None and not fits(loads[name], load),
        load is not None and not load.loaded,
        copies.get(name, 0),
        name,
    )

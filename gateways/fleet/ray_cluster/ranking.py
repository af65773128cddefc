"""The ranking of nodes for calls to replicas of Ray Serve, without Ray itself.

Each replica runs beside the daemon of a node, and publishes its name and its load. `choose_node`
decides, as for the entry. This module keeps what it needs: the loads, the calls that the last load
reports do not have yet, and the homes of sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ....backends.errors import Busy, InvalidArgument
from ....ipc.model_names import find_name
from ..routing.choice import FleetLoad, RouteRequest, choose_node, model_names
from ..routing.homes import HOMES_MAX, NodeTable
from ..routing.loads import ByClass, NodeLoad, OwnTurns, TurnKind

NODE = "node"
"""The key of a node's name in the metadata of its replica."""
LOAD, AT = "load", "at"
"""The keys of a node's load and of the time of its report in the statistics of its replica."""
RANKS_MAX = 3
"""Nodes to try in one attempt."""
LOST_S = 10.0
"""Time without a replica after which a node is forgotten, and its sessions get other homes."""
REPORT_AGE_S_MAX = 0.4
"""Maximum age of a report that has come through Ray."""
CALLS_MAX = 10_000


class Candidate(NamedTuple):
    """A replica: the name of its node, and its last statistics."""

    node: str
    stats: Mapping[str, Any]


class RayCall(NamedTuple):
    """A call to route: a key of its own, the request that makes it (which may make several calls),
    its model, and its session, if it has one.
    """

    key: int
    request: str
    model: str
    session: str = ""


def rank_nodes(request: RouteRequest, fleet: FleetLoad) -> list[str]:
    """Return the nodes for a request: the one that `choose_node` names, then the ones that it
    names once these have refused.

    :raises InferdError: as `choose_node` does.
    """
    ranks = [choose_node(request, fleet)]
    while request.home is None and len(ranks) < RANKS_MAX:
        try:
            ranks.append(choose_node(replace(request, excluded=ranks), fleet))
        except Busy:
            break
    return ranks


@dataclass
class _Node:
    at: float = 0.0
    """The time of its last report."""
    load: NodeLoad | None = None
    """The load in the last report; None if the daemon did not answer."""
    turns: OwnTurns = field(default_factory=partial(OwnTurns, REPORT_AGE_S_MAX))
    absent_since: float | None = None
    """When it was first without a replica, if it has none."""

    def take_stats(self, stats: Mapping[str, Any], now: float) -> None:
        self.absent_since = None
        if stats.get(AT, 0.0) > self.at:
            self.at, load = stats[AT], stats.get(LOAD)
            self.load = None if load is None else msgspec.convert(load, NodeLoad)
            self.turns.note_report(self.load, now)


@dataclass
class _Assigned:
    call: RayCall
    node: _Node
    name: str
    """The node's name."""


class CallRouting:
    """The state of one router. Owned by its event loop; *now* is the time of a monotonic clock."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._homes = NodeTable[tuple[str, str]](HOMES_MAX)
        """The nodes of sessions, by model and session."""
        self._calls: OrderedDict[int, _Assigned] = OrderedDict()
        self._by_request: dict[str, list[int]] = {}
        """The keys of the calls that each request makes."""

    def rank(self, call: RayCall, candidates: Iterable[Candidate], now: float) -> list[str]:
        """Return the nodes for a call, the best one first, and count it there.

        :raises InvalidArgument: the call names no model.
        :raises ModelNotFound: no node has the model.
        :raises Busy: the home of its session cannot be reached, or no node takes it now.
        """
        if not call.model:
            raise InvalidArgument(
                "the call names no model", hint="call handle.options(multiplexed_model_id=NAME)"
            )
        self._drop(call.key, now)  # a call that Ray repeats counts once
        self._observe(candidates, now)
        fleet = self._fleet(now)
        call = call._replace(model=find_name(call.model, model_names(fleet.loads)) or call.model)
        ranks = rank_nodes(RouteRequest(call.model, home=self._home_of(call)), fleet)
        self._assign(call, ranks[0], now).turns.note_opened(call.key, _kind_of(call), now)
        return ranks

    def note_routed(self, call: RayCall, name: str, now: float) -> None:
        """Note that the replica of a node has accepted a call, unless it has ended already."""
        ranked = self._calls.get(call.key)
        if name in self._nodes and ranked is not None:
            call = ranked.call
            self._drop(call.key, now)
            self._assign(call, name, now).turns.begin_turn(call.key, _kind_of(call), now)

    def note_completed(self, request: str, name: str, now: float) -> None:
        """Note that a call which a request has made on a node has ended."""
        for key in self._by_request.get(request, ()):
            if self._calls[key].name == name:
                self._drop(key, now)
                return

    def _observe(self, candidates: Iterable[Candidate], now: float) -> None:
        present = set()
        for name, stats in candidates:
            present.add(name)
            self._nodes.setdefault(name, _Node()).take_stats(stats, now)
        for name in self._nodes.keys() - present:
            node = self._nodes[name]
            if node.absent_since is None:
                node.absent_since = now
            elif node.absent_since < now - LOST_S:
                del self._nodes[name]

    def _fleet(self, now: float) -> FleetLoad:
        loads = {
            name: node.load
            for name, node in self._nodes.items()
            if node.load is not None and node.absent_since is None
        }
        opened: dict[tuple[str, str], ByClass] = {
            (name, model): turns
            for name in loads
            for model, turns in self._nodes[name].turns.since_report(now).items()
        }
        return FleetLoad(loads, [name for name in self._nodes if name not in loads], opened)

    def _home_of(self, call: RayCall) -> str | None:
        home = self._homes.find((call.model, call.session)) if call.session else None
        return home if home in self._nodes else None

    def _assign(self, call: RayCall, name: str, now: float) -> _Node:
        node = self._nodes[name]
        self._calls[call.key] = _Assigned(call, node, name)
        self._by_request.setdefault(call.request, []).append(call.key)
        if len(self._calls) > CALLS_MAX:
            # The oldest call was given up before a replica had it.
            self._drop(next(iter(self._calls)), now)
        if call.session:
            self._homes.put((call.model, call.session), name)
        return node

    def _drop(self, key: int, now: float) -> None:
        found = self._calls.pop(key, None)
        if found is None:
            return
        found.node.turns.drop_opened(key)
        found.node.turns.end_turn(key, now)
        siblings = self._by_request[found.call.request]
        siblings.remove(key)
        if not siblings:
            del self._by_request[found.call.request]


def _kind_of(call: RayCall) -> TurnKind:
    return TurnKind(call.model, RouteRequest(call.model).priority)

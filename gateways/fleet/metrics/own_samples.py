"""The entry's own metrics, read from its state at the time of a scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from importlib.metadata import version
from typing import Protocol

from ..copies.copies import Copies
from ..entry.clients.client import FleetClient
from ..entry.nodes.node_link import NodeLink
from ..entry.nodes.nodes import Nodes
from .families import NODE_STATES
from .scraped import Samples


class MoveCounts(Protocol):
    """The moves of sessions between nodes."""

    @property
    def under_way(self) -> int:
        """The number of sessions that are moving now."""

    @property
    def interrupted(self) -> int:
        """The number of sessions whose node is not known."""


class MeasuredEntry(Protocol):
    """The part of the entry that its metrics describe."""

    nodes: Nodes

    @property
    def clients(self) -> Collection[FleetClient]:
        """The clients that are connected."""

    @property
    def operator(self) -> FleetClient:
        """The client that acts on the nodes as the relay's user."""

    @property
    def moves(self) -> MoveCounts:
        """The moves of sessions between nodes."""

    @property
    def copies(self) -> Copies:
        """The copies of sessions on second nodes."""

    @property
    def connections(self) -> int:
        """The number of open connections."""

    @property
    def connections_max(self) -> int:
        """The maximum number of connections."""

    @property
    def is_stopping(self) -> bool:
        """Whether the entry accepts no new requests."""

    @property
    def ray_answers(self) -> bool | None:
        """Whether Ray answers; None where Ray publishes no nodes."""


def own_samples(entry: MeasuredEntry, now: float) -> dict[str, Samples]:
    """Return the samples of all families of the table except `node_up`."""
    links, drained = entry.nodes.links, entry.nodes.drained
    states = Counter(_state(link, is_drained=name in drained) for name, link in links.items())
    contexts: Counter[str] = Counter()
    for client in entry.clients:
        contexts.update(client.contexts.count_by_node)
    return {
        "nodes": [((state,), states[state]) for state in NODE_STATES],
        "node_report_age_seconds": [
            ((name,), now - link.reported_at)
            for name, link in links.items()
            if link.reported_at is not None
        ],
        "contexts": [((name,), contexts[name]) for name in links],
        **_counted(links),
        "sessions_moving": _one(entry.moves.under_way),
        "sessions_interrupted": _one(entry.moves.interrupted),
        "copies": [((name,), entry.copies.table.counts[name]) for name in links],
        "copies_under_way": _one(entry.copies.under_way),
        "changes_copied": _one(entry.copies.counters.stored),
        "changes_without_copy": _one(entry.copies.counters.missed),
        "sessions_promoted": _one(entry.copies.counters.promoted),
        "connections": _one(entry.connections),
        "connections_max": _one(entry.connections_max),
        "requests": _one(sum(len(client.requests) for client in entry.clients)),
        "draining": _one(entry.is_stopping),
        "ray_up": [] if entry.ray_answers is None else _one(entry.ray_answers),
        "build_info": [((version("inferd"),), 1.0)],
    }


def _counted(links: Mapping[str, NodeLink]) -> dict[str, Samples]:
    """Return the samples of the families that count events of nodes."""
    by_name = {name: link.counters for name, link in links.items()}
    return {
        "node_losses": [((name,), found.losses) for name, found in by_name.items()],
        "contexts_opened": [((name,), found.contexts_opened) for name, found in by_name.items()],
        "contexts_refused": [((name,), found.contexts_refused) for name, found in by_name.items()],
        "contexts_lost": [((name,), found.contexts_lost) for name, found in by_name.items()],
        "sessions_moved": [((name,), found.sessions_moved) for name, found in by_name.items()],
        "session_move_failures": [
            ((name,), found.session_move_failures) for name, found in by_name.items()
        ],
    }


def _state(link: NodeLink, *, is_drained: bool) -> str:
    if link.load is None:
        return "lost"
    return "draining" if is_drained or link.load.draining else "ready"


def _one(value: float) -> Samples:
    return [((), float(value))]

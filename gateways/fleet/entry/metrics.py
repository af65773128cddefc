"""Metrics of an entry for Prometheus, and `GET /health`.

No label holds a user, a session or a client. Counters of a node begin again when it is removed
from the fleet. The nodes' own metrics are scraped from their daemons.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import TypeAlias

import anyio.to_thread
import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from ....ipc.metric_families import counter, gauge
from ....ipc.metrics_address import Address
from ....ipc.metrics_listener import CONTENT_TYPE, JSON, HttpListener, Response
from ..frames import Fields
from ..nodes.nodes import NodeLink
from .client import ClientRequest, Fleet, FleetClient

Samples: TypeAlias = list[tuple[tuple[str, ...], float]]
"""The values of a family, by its labels."""
PREFIX = "inferd_fleet_"


NODE = ("node",)
NODE_UP = "node_up"
NODE_STATES = ("ready", "draining", "lost")

_ALL = (
    gauge(
        NODE_UP,
        "1 if the node can be reached; 0 if it is lost.",
        NODE,
    ),
    gauge("nodes", "Nodes by state: `ready`, `draining` or `lost`.", ("state",)),
    gauge(
        "node_report_age_seconds",
        "Time since a node's last report of its load; a node that never sent one has none.",
        NODE,
    ),
    counter("node_losses", "Times that a node was lost.", NODE),
    gauge("contexts", "Open contexts of clients, by their node.", NODE),
    counter("contexts_opened", "Contexts that were opened, by the node that got them.", NODE),
    counter(
        "contexts_refused",
        "Contexts, loads and embeddings that a node refused or failed, so that another node or a"
        " later time had to be chosen.",
        NODE,
    ),
    counter("contexts_lost", "Open contexts that were lost with their node.", NODE),
    counter("sessions_moved", "Sessions that have moved to another node, by the node left.", NODE),
    counter("session_move_failures", "Moves of sessions that failed, by the node left.", NODE),
    gauge("sessions_moving", "Sessions that are moving now."),
    gauge(
        "sessions_interrupted",
        "Sessions whose move was interrupted, until it is known which node has them.",
    ),
    gauge("copies", "Copies of sessions, by the node that has them.", NODE),
    gauge("copies_under_way", "Sessions with changes on their way to their copies."),
    counter("changes_copied", "Changes of sessions that their copies have."),
    counter(
        "changes_without_copy",
        "Changes of sessions that no copy had at first: they wait for their node if it is lost.",
    ),
    counter("sessions_promoted", "Sessions that have continued from their copies."),
    gauge("buffers", "Buffers that clients share with the entry."),
    gauge("buffer_bytes", "Size of these buffers."),
    gauge("buffer_bytes_max", "Maximum size of all of them."),
    gauge("connections", "Open connections of clients."),
    gauge("connections_max", "Maximum number of connections of clients."),
    gauge("requests", "Requests of clients under way."),
    gauge("draining", "1 while the entry accepts no new requests."),
    gauge("ray_up", "1 if Ray answers, 0 if not; only where Ray publishes nodes."),
    gauge("build_info", "Always 1; the version is a label.", ("version",)),
)
FAMILIES = {family.name: family for family in _ALL}
_KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


class FleetFamilies(Collector):
    """The families with their *samples*, and those of the entry's process."""

    def __init__(self, samples: Mapping[str, Samples]):
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for name, samples in self._samples.items():
            family = FAMILIES[name]
            doc = family.doc.replace("`", "")
            made = _KINDS[family.kind](PREFIX + name, doc, labels=family.labels)
            for labels, value in samples:
                made.add_metric(labels, value)
            yield made
        yield from ProcessCollector(registry=None).collect()


async def metrics_text(fleet: Fleet) -> bytes:
    """Return all metrics in Prometheus's text format."""
    async with fleet.metrics_lock:
        families = FleetFamilies(samples_of(fleet, time.monotonic()))
        # Not on the event loop: the text of a large fleet takes long.
        return await anyio.to_thread.run_sync(generate_latest, families)


async def read_metrics(
    client: FleetClient, request: ClientRequest, params: Fields
) -> dict[str, str]:
    """Return the entry's metrics for the call `metrics`."""
    return {"text": (await metrics_text(client.fleet)).decode()}


def samples_of(fleet: Fleet, now: float) -> dict[str, Samples]:
    """Return the samples of all families of the table."""
    links, drained = fleet.nodes.links, fleet.nodes.drained
    ray = fleet.discovery
    states = Counter(_state(link, is_drained=name in drained) for name, link in links.items())
    contexts: Counter[str] = Counter()
    for client in fleet.clients:
        contexts.update(client.contexts.count_by_node)
    return {
        NODE_UP: [((name,), float(link.load is not None)) for name, link in links.items()],
        "nodes": [((state,), states[state]) for state in NODE_STATES],
        "node_report_age_seconds": [
            ((name,), now - link.reported_at)
            for name, link in links.items()
            if link.reported_at is not None
        ],
        "contexts": [((name,), contexts[name]) for name in links],
        **_counted(links),
        "sessions_moving": _one(fleet.moves.under_way),
        "sessions_interrupted": _one(fleet.moves.interrupted),
        "copies": [((name,), fleet.copies.table.counts[name]) for name in links],
        "copies_under_way": _one(fleet.copies.under_way),
        "changes_copied": _one(fleet.copies.counters.stored),
        "changes_without_copy": _one(fleet.copies.counters.missed),
        "sessions_promoted": _one(fleet.copies.counters.promoted),
        "buffers": _one(fleet.buffers.held.count),
        "buffer_bytes": _one(fleet.buffers.held.total_bytes),
        "buffer_bytes_max": _one(fleet.buffers.held.limits.bytes_max),
        "connections": _one(len(fleet.places.holders)),
        "connections_max": _one(fleet.places.connections_max),
        "requests": _one(sum(len(client.requests) for client in fleet.clients)),
        "draining": _one(fleet.stopping.is_set()),
        "ray_up": [] if ray is None else _one(ray.answers),
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


class MetricsListener:
    """The HTTP listener of an entry's metrics. *note* prints what an operator should know."""

    def __init__(self, fleet: Fleet, address: Address, note: Callable[[str], object]):
        self._fleet, self._note = fleet, note
        self._failure: str | None = None
        """The failure to listen that was printed last."""
        self._listener = HttpListener(
            address,
            {"/metrics": self._respond_metrics, "/health": self._respond_health},
            self._note_listening,
            lambda path, exc: note(f"GET {path} has failed: {exc}"),
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        self._listener.open()
        await self._listener.run()

    def _note_listening(self, failure: str | None) -> None:
        if failure is None:
            self._note(f"the metrics of the fleet are at {self._listener.where}")
        elif failure != self._failure:
            self._note(f"the metrics are not served: {failure}; the entry tries again")
        self._failure = failure

    async def _respond_metrics(self) -> Response:
        return 200, CONTENT_TYPE, await metrics_text(self._fleet)

    async def _respond_health(self) -> Response:
        failing, is_stopping = self._fleet.nodes.unreachable(), self._fleet.stopping.is_set()
        status = "draining" if is_stopping else "degraded" if failing else "ok"
        body = msgspec.json.encode({"status": status, "failing": failing})
        serves = not is_stopping and len(failing) < len(self._fleet.nodes.links)
        return (200 if serves else 503), JSON, body + b"\n"

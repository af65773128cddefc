"""The table of the entry's own metric families: names, kinds, labels and help texts.

No label holds a user, a session or a client. Counters of a node begin again when it is removed
from the fleet.
"""

from __future__ import annotations

from ....ipc.http.metric_families import counter, gauge

PREFIX = "inferd_fleet_"


NODE = ("node",)
NODE_UP = "node_up"
NODE_STATES = ("ready", "draining", "lost")

_ALL = (
    gauge(
        NODE_UP,
        "1 if the scrape has the node's own metrics; 0 if the node is lost, did not answer in time,"
        " or sent too much.",
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
    gauge("connections", "Open connections of clients."),
    gauge("connections_max", "Maximum number of connections of clients."),
    gauge("requests", "Requests of clients under way."),
    gauge("draining", "1 while the entry accepts no new requests."),
    gauge("ray_up", "1 if Ray answers, 0 if not; only where Ray publishes nodes."),
    gauge("build_info", "Always 1; the version is a label.", ("version",)),
)
FAMILIES = {family.name: family for family in _ALL}

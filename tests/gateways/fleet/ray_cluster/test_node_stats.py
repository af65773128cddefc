"""The statistics of a replica beside a daemon."""

from __future__ import annotations

import anyio
import msgspec

from inferd.gateways.fleet.ray_cluster.node_stats import NodeStats
from inferd.gateways.fleet.ray_cluster.ranking import AT, LOAD, NODE
from inferd.gateways.fleet.routing.loads import NodeLoad
from inferd.testing import running_daemon
from tests.echo import echo_model


def test_a_replica_publishes_the_load_of_its_daemon_and_outlives_it() -> None:
    with running_daemon(echo_model("m", slots=3)) as daemon:
        replica = NodeStats("a", daemon.socket)
        assert replica.record_replica_metadata() == {NODE: "a"}
        first = anyio.run(replica.record_routing_stats)
        assert msgspec.convert(first[LOAD], NodeLoad).models["m"].slots == 3
        daemon.kill()
        second = anyio.run(replica.record_routing_stats)
    assert LOAD not in second and second[AT] > first[AT]

"""A router that notes the nodes that it names. Ray copies this module with its variables."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RunningReplica

from inferd.gateways.fleet.ray_cluster.router import FleetRouter, node_of
from tests.gateways.fleet.ray_cluster import routed_nodes


class NotingRouter(FleetRouter):
    """Notes the first node for each call."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is not None and ranks and not pending_request.future.done():
            routed_nodes.NAMED[pending_request.args[0]] = node_of(ranks[0][0])
        return ranks

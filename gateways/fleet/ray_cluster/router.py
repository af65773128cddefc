"""A router of Ray Serve that sends each call to the node that `choose_node` names.

It is for deployments of which each replica runs beside a node's daemon and is a `NodeStats`. A call
names its model and session by `handle.options(multiplexed_model_id=…, session_id=…)`.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ....backends.errors import Busy, InferdError
from .ranking import NODE, CallRouting, Candidate, RayCall

FIRST_REPORT_S_MAX = 5.0
"""Time that a call waits for the first reports of new replicas."""
PROBE_S = 2.0
"""Time that a call waits for a replica's answer before it goes to another."""


class FleetRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed here
    """Owned by Ray's event loop in each process that has a handle of the deployment.

    It has no FIFOMixin, which may give a replica chosen for one call to another call.
    """

    queue_len_response_deadline_s = PROBE_S

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._routing = CallRouting()
        self._names: dict[ReplicaID, str] = {}
        self._pending: dict[int, PendingRequest] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas of the best nodes, one rank for each node. An error ends the call; if
        it were raised here, Ray would repeat the choice for ever.
        """
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Ray repeats without a pause
        replicas: dict[str, list[RunningReplica]] = {}
        for replica in candidate_replicas:
            replicas.setdefault(node_of(replica), []).append(replica)
        candidates = [Candidate(node_of(r), r.routing_stats or {}) for r in candidate_replicas]
        call = call_of(pending_request)
        try:
            return [replicas[n] for n in self._routing.rank(call, candidates, time.monotonic())]
        except InferdError as exc:
            if isinstance(exc, Busy) and _awaits_reports(pending_request, candidates):
                return []
            if not pending_request.future.done():
                pending_request.future.set_exception(exc)
            self._remove_pending_request_from_indices(pending_request)
            return [candidate_replicas]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Count a call on the node whose replica has accepted it."""
        replica = self.curr_replicas.get(replica_id)
        if replica is not None:
            call = call_of(pending_request)
            self._routing.note_routed(call, node_of(replica), time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        node = self._names.get(replica_id, "")
        self._routing.note_completed(internal_request_id, node, time.monotonic())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._names = {replica.replica_id: node_of(replica) for replica in replicas}
        super().update_replicas(replicas)

    # Ray finds the call for a chosen replica by the request's id, which all calls of one request
    # have. It would give the replica to another of them, and leave this one waiting for ever.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        self._pending[id(pending_request.metadata)] = pending_request

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        self._pending.pop(id(pending_request.metadata), None)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: object = None
    ) -> PendingRequest | None:
        found = self._pending.get(id(request_metadata))
        return None if found is None or found.future.done() else found


def call_of(pending_request: PendingRequest) -> RayCall:
    """Return what routing needs to know of a call."""
    metadata = pending_request.metadata
    return RayCall(
        id(pending_request),
        metadata.internal_request_id,
        metadata.multiplexed_model_id,
        metadata.session_id,
    )


def node_of(replica: RunningReplica) -> str:
    """Return the node of a replica; one that names none is a node of its own."""
    return str(replica.replica_metadata.get(NODE) or replica.replica_id.unique_id)


def _awaits_reports(pending_request: PendingRequest, candidates: list[Candidate]) -> bool:
    is_new = time.time() < pending_request.created_at + FIRST_REPORT_S_MAX
    return is_new and not all(candidate.stats for candidate in candidates)

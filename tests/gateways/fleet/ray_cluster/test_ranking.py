"""The ranking of nodes for calls to replicas of Ray Serve."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inferd.backends.errors import Busy, InvalidArgument, ModelNotFound
from inferd.gateways.fleet.ray_cluster.ranking import (
    AT,
    CALLS_MAX,
    LOAD,
    LOST_S,
    RANKS_MAX,
    REPORT_AGE_S_MAX,
    CallRouting,
    Candidate,
    RayCall,
)
from inferd.gateways.fleet.routing.loads import ModelLoad, NodeLoad

SLOTS = 4


def stats(*models: str, at: float = 1.0, running: int = 0, draining: bool = False) -> Any:
    """Return the statistics of a replica whose node has *models* loaded."""
    load = ModelLoad(loaded=True, slots=SLOTS, running=(0, running, 0, 0))
    node = NodeLoad(
        instance=1, sessions_max=100, draining=draining, models=dict.fromkeys(models, load)
    )
    return {AT: at, LOAD: msgspec.to_builtins(node)}


def candidates(**found: Any) -> list[Candidate]:
    return [Candidate(node, one) for node, one in found.items()]


IDLE = candidates(a=stats("m"), b=stats("m"), c=stats("m", "other"))


def test_calls_of_one_moment_are_spread_over_the_free_slots() -> None:
    routing = CallRouting()
    nodes = [routing.rank(RayCall(n, str(n), "m"), IDLE, 0.0)[0] for n in range(3 * SLOTS)]
    assert {node: nodes.count(node) for node in "abc"} == dict.fromkeys("abc", SLOTS)


def test_the_ranks_are_the_choices_after_refusals() -> None:
    found = candidates(a=stats("m", running=2), b=stats("m"), c=stats("m", running=1), d=stats())
    assert CallRouting().rank(RayCall(1, "1", "m"), found, 0.0) == ["b", "c", "a"]
    many = candidates(**{name: stats("m") for name in "abcdef"})
    assert len(CallRouting().rank(RayCall(1, "1", "m"), many, 0.0)) == RANKS_MAX


def test_a_call_counts_until_it_ends_or_a_report_has_it() -> None:
    routing = CallRouting()
    two = candidates(a=stats("m"), b=stats("m", running=2))
    assert [routing.rank(RayCall(n, str(n), "m"), two, 0.0)[0] for n in range(2)] == ["a", "a"]
    for n in range(2):
        routing.note_routed(RayCall(n, str(n), "m"), "a", 0.0)
    assert routing.rank(RayCall(2, "2", "m"), two, 1.0)[0] == "b", "they run still"
    reported = candidates(a=stats("m", at=2.0, running=2), b=stats("m", running=3))
    later = 1.0 + REPORT_AGE_S_MAX
    assert routing.rank(RayCall(3, "3", "m"), reported, later)[0] == "a", "the report has them"
    for n in range(2):
        routing.note_completed(str(n), "a", later)
    idle_again = candidates(a=reported[0].stats, b=stats("m", at=2.0, running=1))
    assert routing.rank(RayCall(4, "4", "m"), idle_again, later)[0] == "a", "they have ended since"


def test_a_call_that_was_given_up_before_a_replica_had_it_does_not_count_for_long() -> None:
    routing = CallRouting()
    two = candidates(a=stats("m"), b=stats("m", running=2))
    for n in range(2):
        routing.rank(RayCall(n, str(n), "m"), two, 0.0)
    assert routing.rank(RayCall(2, "2", "m"), two, 0.1)[0] == "b"
    assert routing.rank(RayCall(3, "3", "m"), two, 1.0)[0] == "a"


def test_a_repeated_call_counts_once_and_where_a_replica_took_it() -> None:
    routing = CallRouting()
    two = candidates(a=stats("m"), b=stats("m", running=1))
    call = RayCall(1, "1", "m", "diary")
    for _ in range(3):
        assert routing.rank(call, two, 0.0)[0] == "a"
    routing.note_routed(call, "b", 0.0)
    routing.note_completed("1", "b", 0.0)
    routing.note_routed(call, "b", 0.0)  # too late: Serve reports both in any order
    assert routing.rank(RayCall(2, "2", "m", "diary"), two, 0.0) == ["b"]
    assert routing.rank(RayCall(3, "3", "m"), two, 0.0)[0] == "a"


def test_calls_of_one_request_are_counted_apart() -> None:
    routing = CallRouting()
    two = candidates(a=stats("m"), b=stats("m", running=2))
    calls = [RayCall(n, "front", "m") for n in range(4)]
    nodes = [routing.rank(call, two, 0.0)[0] for call in calls]
    assert nodes == ["a", "a", "b", "a"]
    for call, node in zip(calls, nodes, strict=True):
        routing.note_routed(call, node, 0.0)
    for node in nodes:
        routing.note_completed("front", node, 0.0)
    assert not routing._calls and not routing._by_request
    assert routing.rank(RayCall(9, "9", "m"), two, 0.0) == ["a", "b"]


def test_a_session_stays_at_home_and_waits_for_it_for_a_time() -> None:
    routing = CallRouting()
    assert routing.rank(RayCall(1, "1", "m", "diary"), IDLE, 0.0)[0] == "a"
    full = candidates(a=stats("m", at=2.0, running=SLOTS), b=stats("m"), c=stats("m"))
    assert routing.rank(RayCall(2, "2", "m", "diary"), full, 1.0) == ["a"]
    assert routing.rank(RayCall(3, "3", "other", "diary"), IDLE, 1.0) == ["c"], "of another model"
    for now in (2.0, 2.0 + LOST_S):
        with pytest.raises(Busy, match="node a cannot be reached"):
            routing.rank(RayCall(4, "4", "m", "diary"), full[1:], now)
    lost = routing.rank(RayCall(5, "5", "m", "diary"), full[1:], 2.1 + LOST_S)
    assert lost[0] in "bc"
    assert routing.rank(RayCall(6, "6", "m", "diary"), IDLE, 3.0 + LOST_S) == lost[:1]


def test_a_model_is_missing_only_if_all_nodes_are_known() -> None:
    routing = CallRouting()
    with pytest.raises(ModelNotFound, match="no node has a model"):
        routing.rank(RayCall(1, "1", "none"), IDLE, 0.0)
    new = [*IDLE, Candidate("d", {})]
    with pytest.raises(Busy, match="no reachable node"):
        routing.rank(RayCall(2, "2", "none"), new, 0.0)
    silent = candidates(c={AT: 2.0})
    with pytest.raises(Busy) as caught:
        routing.rank(RayCall(3, "3", "other"), [*IDLE[:2], *silent], 1.0)
    assert caught.value.data["nodes"] == ["c", "d"] and caught.value.retry_after_s > 0
    with pytest.raises(Busy):
        routing.rank(RayCall(4, "4", "other"), IDLE[:2], 2.0)
    with pytest.raises(ModelNotFound):
        routing.rank(RayCall(4, "4", "other"), IDLE[:2], 3.0 + LOST_S)
    with pytest.raises(Busy, match="take no further"):
        routing.rank(RayCall(5, "5", "m"), candidates(a=stats("m", at=3.0, draining=True)), 40.0)
    with pytest.raises(InvalidArgument, match="names no model"):
        routing.rank(RayCall(6, "6", ""), IDLE, 0.0)


def test_the_calls_of_a_router_have_a_bound() -> None:
    routing = CallRouting()
    one = IDLE[:1]
    for n in range(CALLS_MAX + 1):
        routing.rank(RayCall(n, str(n), "m"), one, n / 10)
    assert len(routing._calls) == len(routing._by_request) == CALLS_MAX
